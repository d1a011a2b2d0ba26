"""Kernels for CUDA, in Triton. Without a GPU they run in Triton's interpreter, on CPU tensors."""
