"""Parts of bench.gpu: tests, limits, steps, kernels and serving on a GPU."""
