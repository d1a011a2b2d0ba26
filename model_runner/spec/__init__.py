"""Specifications of models as plain data: families, layers, sizes, and the files of a folder."""
