"""Platforms: how models are loaded and run on a device."""
