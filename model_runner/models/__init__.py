"""Loads models and makes their results exact: weights, activations, attention."""
