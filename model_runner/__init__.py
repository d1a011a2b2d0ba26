"""Computes. The only package that imports torch and the model code of transformers."""
