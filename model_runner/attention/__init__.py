"""Attention over the paged KV cache: one interface, one file for each backend."""
