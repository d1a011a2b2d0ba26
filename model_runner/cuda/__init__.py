"""Layers, products and graphs on CUDA."""
