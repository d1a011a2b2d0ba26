"""Sums and softmaxes of rows that depend only on the row, not on the number of rows or its place in memory.

torch's own do not guarantee this. Its CPU sum splits a single long row between threads. On CUDA its cumulative sum
assigns rows to threads by their number, in an order that may change between runs, so sums are made of elementwise
operations here. CUDA softmax starts at the first 16-byte boundary in memory, which differs between rows if the row
width is not a multiple of 16 bytes, so rows are padded.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_TOGETHER = 16
"""Bytes that a CUDA thread reads at once."""


def row_sums(values: Tensor) -> Tensor:
    """[n, 1] sums of values [n, width]."""
    return _halve(values) if values.is_cuda else values.cumsum(-1)[:, -1:]


def cumulative_sums(values: Tensor) -> Tensor:
    """[n, width] cumulative sums of values [n, width]. Each depends only on the values up to it."""
    return _double(values) if values.is_cuda else values.cumsum(-1)


def entropies(probs: Tensor) -> Tensor:
    """[n, 1] entropies in nats of probabilities [n, width]."""
    return -row_sums(torch.xlogy(probs, probs))  # torch.special.entr would be compiled on first use on CUDA


def row_softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension."""
    return _filled_up(torch.softmax, scores) if scores.is_cuda else torch.softmax(scores, -1)


def row_log_softmax(scores: Tensor) -> Tensor:
    """Log-softmax over the last dimension."""
    return _filled_up(torch.log_softmax, scores) if scores.is_cuda else torch.log_softmax(scores, -1)


def _filled_up(softmax: Callable[[Tensor, int], Tensor], scores: Tensor) -> Tensor:
    """Apply `softmax` to rows padded to a multiple of `_TOGETHER` bytes; padding has probability 0."""
    width = scores.shape[-1]
    missing = -width % (_TOGETHER // scores.itemsize)
    if not missing:
        return softmax(scores, -1)
    return softmax(F.pad(scores, (0, missing), value=-torch.inf), -1)[..., :width].contiguous()


def _halve(values: Tensor) -> Tensor:
    """Add the second half of each row to the first until one value is left."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        added = values[:, :half] + values[:, half : 2 * half]
        values = torch.cat([added, values[:, 2 * half :]], -1)
    return values


def _double(values: Tensor) -> Tensor:
    """Cumulative sums: adds the value 1, 2, 4, ... places before (Hillis and Steele, doi:10.1145/7902.7903)."""
    distance = 1
    while distance < values.shape[1]:
        values = torch.cat([values[:, :distance], values[:, distance:] + values[:, :-distance]], -1)
        distance *= 2
    return values
