"""Trains draft heads on a model's own answers."""
