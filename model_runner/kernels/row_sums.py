"""Sums and softmaxes of rows that depend on nothing but the row: not on how many there are, nor on where it lies.

torch's own do: its sum splits a single long row among threads, and on CUDA its cumulative sum shares rows out among
threads by their number, in an order that may even change from run to run. There, sums are made of operations that work
on each element by itself. A softmax on CUDA shares a row out from the first 16 bytes on that lie together in memory,
which are others in each row if a row's width is no multiple of them; so rows are made longer until it is.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_TOGETHER = 16
"""Bytes that a thread on CUDA reads at once."""


def row_sums(values: Tensor) -> Tensor:
    """[n, 1] of values [n, width]."""
    return _halve(values) if values.is_cuda else values.cumsum(-1)[:, -1:]


def cumulative_sums(values: Tensor) -> Tensor:
    """[n, width] of values [n, width]: each with all before it. What comes after it does not matter."""
    return _double(values) if values.is_cuda else values.cumsum(-1)


def entropies(probs: Tensor) -> Tensor:
    """[n, 1] of probabilities [n, width], in nats."""
    return -row_sums(torch.xlogy(probs, probs))  # torch.special.entr would be compiled at its first use on CUDA


def row_softmax(scores: Tensor) -> Tensor:
    """[..., width] of scores [..., width]."""
    return _filled_up(torch.softmax, scores) if scores.is_cuda else torch.softmax(scores, -1)


def row_log_softmax(scores: Tensor) -> Tensor:
    """[..., width] of scores [..., width]."""
    return _filled_up(torch.log_softmax, scores) if scores.is_cuda else torch.log_softmax(scores, -1)


def _filled_up(softmax: Callable[[Tensor, int], Tensor], scores: Tensor) -> Tensor:
    """Of rows that end at whole `_TOGETHER`; what they are filled up with has the probability 0."""
    width = scores.shape[-1]
    missing = -width % (_TOGETHER // scores.itemsize)
    if not missing:
        return softmax(scores, -1)
    return softmax(F.pad(scores, (0, missing), value=-torch.inf), -1)[..., :width].contiguous()


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
