"""Measurements. Run each from the root of the repository: `python -m bench.roofline`, `bench.serving`, `bench.soak`."""
