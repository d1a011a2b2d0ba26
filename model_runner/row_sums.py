"""Sums of rows that do not depend on how many rows there are.

torch's own do: its sum splits a single long row among threads, and on CUDA its cumulative sum shares rows out among
threads by their number, in an order that may even change from run to run. There, sums are made of operations that work
on each element by itself.
"""

import torch
from torch import Tensor


def row_sums(values: Tensor) -> Tensor:
    """[n, 1] of values [n, width]."""
    return _halve(values) if values.is_cuda else values.cumsum(-1)[:, -1:]


def cumulative_sums(values: Tensor) -> Tensor:
    """[n, width] of values [n, width]: each with all before it. What comes after it does not matter."""
    return _double(values) if values.is_cuda else values.cumsum(-1)


def _halve(values: Tensor) -> Tensor:
    """Adds the second half of each row to the first until one number is left."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        added = values[:, :half] + values[:, half : 2 * half]
        values = torch.cat([added, values[:, 2 * half :]], -1)
    return values


def _double(values: Tensor) -> Tensor:
    """Adds what stands 1, 2, 4, ... places before (Hillis and Steele, doi:10.1145/7902.7903)."""
    distance = 1
    while distance < values.shape[1]:
        values = torch.cat([values[:, :distance], values[:, distance:] + values[:, :-distance]], -1)
        distance *= 2
    return values
