"""Weights in int4 for CUDA: which groups of inputs share a scale and a minimum, and finding them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model_runner.kernels.library import INT4_GROUP
from model_runner.kernels.triton.linear_int4 import Int4Weight

_WIDE_GROUP = 128
"""4.25 bits a weight. A minimum beside the scale costs 1/8 bit, and weights of a group are rarely centred: it saves
more error than groups half as large with a scale alone, which cost the same."""
_LEVELS = 15
_FITS = 4
_SLAB = 1 << 24
"""Weights that are packed at once: 64 MiB of float32, and a few such beside it."""


def group_size(inputs: int) -> int | None:
    """Inputs of a group: 128, or else as on CPU; None if there are no whole groups."""
    return next((group for group in (_WIDE_GROUP, INT4_GROUP) if inputs % group == 0), None)


def pack_int4(weight: Tensor) -> Int4Weight:
    """Quantise a weight [out, in], or [experts, out, in], such that the squared error of each group is small.

    Weights between whose smallest and largest all 16 levels lie evenly stay as they are.

    Raises:
        ValueError: if the inputs make no whole groups, or a weight is too large for float16.
    """
    *experts, outputs, inputs = weight.shape
    group = group_size(inputs)
    if group is None:
        raise ValueError(f"{inputs} inputs cannot be packed in int4: they are no multiple of {INT4_GROUP}")
    groups = inputs // group
    shape = (*experts, groups, outputs)
    nibbles = torch.empty((*shape, group // 2), dtype=torch.uint8, device=weight.device)
    lines = torch.empty((*shape, 2), dtype=torch.float16, device=weight.device)
    parts = (weight, nibbles, lines) if experts else (weight[None], nibbles[None], lines[None])
    for one, its_nibbles, its_lines in zip(*parts, strict=True):
        for slab in slabs(outputs, inputs):
            grouped = one[slab].float().view(-1, groups, group).transpose(0, 1)
            integers, line = _fit(grouped)
            first, second = integers.to(torch.uint8).chunk(2, dim=-1)
            its_nibbles[:, slab] = first | second << 4
            its_lines[:, slab] = line
    if not torch.isfinite(lines).all():
        raise ValueError("weights beyond the range of float16 cannot be packed in int4")
    return Int4Weight(nibbles, lines.view(torch.int32).squeeze(-1))


def slabs(outputs: int, inputs: int) -> Iterator[slice]:
    """Outputs to work on at once, so that little memory is needed beside the weights."""
    step = max(1, _SLAB // inputs)
    return (slice(start, min(start + step, outputs)) for start in range(0, outputs, step))


def _fit(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of groups [..., group], and scale and minimum [..., 2] in float16.

    First a line between the smallest and the largest weight, then a few times the line that fits the last integers best
    by least squares; the one with the smallest squared error is taken.
    """
    low, high = weights.aminmax(dim=-1, keepdim=True)
    line = torch.cat([(high - low) / _LEVELS, low], dim=-1).half()
    integers, error = _round(weights, line)
    best, lowest = line, error
    for _ in range(_FITS):
        line = _least_squares(weights, integers)
        integers, error = _round(weights, line)
        better = error < lowest
        best, lowest = torch.where(better, line, best), torch.where(better, error, lowest)
    return _round(weights, best)[0], best


def _round(weights: Tensor, line: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest integers on a line, and their squared error [..., 1]."""
    scale, minimum = line.float().unsqueeze(-2).unbind(-1)
    integers = ((weights - minimum) / torch.where(scale > 0, scale, torch.inf)).round().clamp(0, _LEVELS)
    return integers, (weights - (integers * scale + minimum)).square().sum(-1, keepdim=True)


def _least_squares(weights: Tensor, integers: Tensor) -> Tensor:
    """The line [..., 2] through the points (integer, weight)."""
    mean_integer, mean_weight = integers.mean(-1, keepdim=True), weights.mean(-1, keepdim=True)
    off = integers - mean_integer
    spread = off.square().sum(-1, keepdim=True)
    slope = (off * (weights - mean_weight)).sum(-1, keepdim=True) / torch.where(spread > 0, spread, torch.inf)
    return torch.cat([slope, mean_weight - slope * mean_integer], dim=-1).half()
