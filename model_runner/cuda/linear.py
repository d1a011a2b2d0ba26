"""Matrix products on CUDA, and the types that weights are stored in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from model_runner.kernels.library import INT4_GROUP
from model_runner.kernels.triton.linear import (
    FP8,
    FP8_MAX,
    Addends,
    ExpertRows,
    Scales,
    expert_sum,
    linear,
    quantize_rows,
    shape_for,
    shapes,
)
from model_runner.kernels.triton.linear_int4 import Int4Weight, int4_shape_for, linear_int4
from model_runner.kernels.triton.tiles import TileShape
from model_runner.modules.experts import ExpertWeights, activation_between, take_expert_weights


class GpuProduct(Protocol):
    """Multiplies rows with one weight [out, in]."""

    def __call__(self, rows: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Rows [n, in] -> rows @ weight.T + bias + residual, [n, out], in the residual's type; rounded once."""
        ...


MakeProduct = Callable[[Tensor], GpuProduct]
"""Takes a weight [out, in], which the caller may free afterwards."""


GpuWeightKind = Literal["fp8", "int4"]
"""fp8 has one scale per output and one per row; int4 has a scale and a minimum per output and group."""


class CublasProduct:
    """A weight [out, in] in its own type. A row's result depends on the number of rows, so it is not for exact mode."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, rows: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        weight = self._weight.to(rows.dtype)
        if residual is None:
            return F.linear(rows, weight, bias)
        return torch.addmm(residual if bias is None else residual + bias, rows, weight.t())


class TiledProduct(ABC):
    """A product by our kernels, with a weight [out, in] or [experts, out, in]. Rows do not depend on each other."""

    def __init__(self, *, one_shape: bool) -> None:
        """With `one_shape`, the same tiles serve all numbers of rows; needed if `tile_shapes_agree` is False."""
        self._one_shape = one_shape

    def __call__(
        self,
        rows: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        experts: ExpertRows | None = None,
    ) -> Tensor:
        """As in GpuProduct; with `experts`, each row is multiplied with its expert's weight."""
        return self._multiply(_plain(rows), _addends(bias, residual), experts)

    @abstractmethod
    def _multiply(self, rows: Tensor, addends: Addends, experts: ExpertRows | None) -> Tensor:
        """The same of rows that are contiguous each."""


class TritonProduct(TiledProduct):
    """A weight in its own type. Rows have the same type, or float32."""

    def __init__(self, weight: Tensor, *, one_shape: bool = False) -> None:
        """Keeps the weight without copying it if it is contiguous."""
        super().__init__(one_shape=one_shape)
        self._weight = weight.detach().contiguous()

    def _multiply(self, rows: Tensor, addends: Addends, experts: ExpertRows | None) -> Tensor:
        shape = shape_for(rows, self._weight, num_rows=1) if self._one_shape else None
        out = rows.new_empty(rows.shape[0], self._weight.shape[-2])
        return linear(rows, self._weight, out, addends=addends, experts=experts, shape=shape)


class Fp8Product(TiledProduct):
    """A weight in e4m3 with a scale per output; rows of any floating type are also rounded to e4m3.

    Both kinds of scales map the largest magnitude to 448.
    """

    def __init__(self, weight: Tensor, *, one_shape: bool = False) -> None:
        super().__init__(one_shape=one_shape)
        self._weight, self._scales = quantize_weight(weight.detach())

    def _multiply(self, rows: Tensor, addends: Addends, experts: ExpertRows | None) -> Tensor:
        numbers = torch.empty(rows.shape, dtype=FP8, device=rows.device)
        scales = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
        quantize_rows(rows, numbers, scales)
        shape = shape_for(numbers, self._weight, num_rows=1) if self._one_shape else None
        out = rows.new_empty(rows.shape[0], self._weight.shape[-2])
        both = Scales(scales, self._scales)
        return linear(numbers, self._weight, out, addends=addends, scales=both, experts=experts, shape=shape)


class Int4Product(TiledProduct):
    """A weight in int4, converted in the product to the rows' type, float16 or bfloat16."""

    def __init__(self, weight: Tensor, *, one_shape: bool = False) -> None:
        super().__init__(one_shape=one_shape)
        self.weight = pack_int4(weight.detach())

    def _multiply(self, rows: Tensor, addends: Addends, experts: ExpertRows | None) -> Tensor:
        if rows.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"int4 weights need rows in float16 or bfloat16, not {rows.dtype}")
        shape = int4_shape_for(1, self.weight) if self._one_shape else None
        out = rows.new_empty(rows.shape[0], self.weight.outputs)
        return linear_int4(rows, self.weight, out, addends=addends, experts=experts, shape=shape)


def make_tiled_product(weight: Tensor, kind: GpuWeightKind | None, *, one_shape: bool = False) -> TiledProduct:
    """The product with a weight [out, in] or [experts, out, in]; dense if int4 has no whole groups."""
    if kind == "fp8":
        return Fp8Product(weight, one_shape=one_shape)
    if kind == "int4" and group_size(weight.shape[-1]) is not None:
        return Int4Product(weight, one_shape=one_shape)
    return TritonProduct(weight, one_shape=one_shape)


def make_product(weight: Tensor, kind: GpuWeightKind | None, *, exact: bool, one_shape: bool = False) -> GpuProduct:
    """The product with a weight [out, in]; uses cuBLAS for dense weights if results need not be exact."""
    product = make_tiled_product(weight, kind, one_shape=one_shape)
    return CublasProduct(weight.detach()) if isinstance(product, TritonProduct) and not exact else product


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [..., out, in] in e4m3, and the float32 scales [..., out] of its outputs."""
    *outer, inputs = weight.shape
    flat = weight.reshape(-1, inputs)
    numbers = torch.empty(flat.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(flat.shape[0], dtype=torch.float32, device=weight.device)
    for slab in slabs(*flat.shape):
        part = flat[slab].float()
        largest = part.abs().amax(dim=-1)
        scales[slab] = torch.where(largest > 0, largest / FP8_MAX, 1.0)
        numbers[slab] = (part / scales[slab, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return numbers.view(weight.shape), scales.view(*outer)


def tile_shapes_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether all tile shapes give bit-identical results on this GPU (see kernels/triton/tiles.py).

    Args:
        device: where the products run.
        dtype: type of the rows: float16, bfloat16 or float8_e4m3fn.
    """
    return all(_shapes_agree(device, dtype, inputs) for inputs in (1056, 1152))  # 1152 inputs are whole steps


def _shapes_agree(device: torch.device, dtype: torch.dtype, inputs: int) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    rows, weight = (
        torch.randn(count, inputs, generator=generator, device=device).mul_(factor).to(dtype)
        for count, factor in ((150, 4), (520, 0.1))
    )
    ones = torch.ones(520, device=device)
    scales = Scales(ones, ones) if dtype == FP8 else None

    def product(shape: TileShape) -> Tensor:
        out = torch.empty(150, 520, dtype=torch.float32, device=device)
        return linear(rows, weight, out, scales=scales, shape=shape)

    first, *others = (product(shape) for shape in shapes(dtype, inputs))
    return all(torch.equal(first, other) for other in others)


def _plain(rows: Tensor) -> Tensor:
    """The rows, each contiguous, at any distance from each other."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _addends(bias: Tensor | None, residual: Tensor | None) -> Addends:
    return Addends(bias, None if residual is None else _plain(residual))


GROUPED_EXPERTS_NAME = "samewise_grouped"


def register_grouped_experts() -> None:
    """Register `grouped_experts` with transformers, unless compile_layers registered an uncompiled version."""
    if GROUPED_EXPERTS_NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(GROUPED_EXPERTS_NAME, grouped_experts)


class GroupedExperts:
    """The weights of all experts of one layer."""

    def __init__(self, weights: ExpertWeights, kind: GpuWeightKind | None, *, one_shape: bool = False) -> None:
        self.up = make_tiled_product(weights.up.contiguous(), kind, one_shape=one_shape)
        self.down = make_tiled_product(weights.down.contiguous(), kind, one_shape=one_shape)
        self.biases = weights.up_bias, weights.down_bias
        self.bounds = torch.arange(len(weights.up) + 1, device=weights.up.device)


def grouped_experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum of the chosen experts' outputs, added in the order of each token's ranks.

    A token's result depends on no other token: products and sums are independent of the other tokens' places.

    Args:
        module: the experts module, after `group_experts`.
        hidden: [tokens, hidden].
        top_k_index: [tokens, k] experts of each token.
        top_k_weights: [tokens, k] their weights.

    Returns:
        [tokens, hidden].
    """
    grouped = module.grouped
    assert isinstance(grouped, GroupedExperts)
    index = top_k_index.reshape(-1)
    sorted_index, order = index.sort(stable=True)
    experts = ExpertRows(torch.searchsorted(sorted_index, grouped.bounds.to(index.dtype), out_int32=True))
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    rows = hidden[order // top_k_index.shape[1]]  # [tokens * k, hidden]
    up_bias, down_bias = (None if bias is None else bias[sorted_index] for bias in grouped.biases)
    gated = activation_between(module)(grouped.up(rows, residual=up_bias, experts=experts))
    outputs = grouped.down(gated, residual=down_bias, experts=experts)
    return expert_sum(
        outputs, places.view(top_k_index.shape), top_k_weights.contiguous(), hidden.new_empty(hidden.shape)
    )


def group_experts(model: nn.Module, kind: GpuWeightKind | None, *, one_shape: bool = False) -> None:
    """Replace the expert weights of every layer that has experts.

    Raises:
        ValueError: if the layout of the experts is not supported.
    """
    for module, weights in take_expert_weights(model, ours_alone=True):
        module.grouped = GroupedExperts(weights, kind, one_shape=one_shape)


_WIDE_GROUP = 128
"""4.25 bits per weight. A minimum in addition to the scale costs 1/8 bit, and weights of a group are rarely centred. It
reduces the error more than groups of half the size without minimum, which cost the same."""
_LEVELS = 15
_FITS = 4
_SLAB = 1 << 24
"""Weights packed at once: 64 MiB of float32, plus a few temporaries of the same size."""


def group_size(inputs: int) -> int | None:
    """Inputs per group: 128 if it divides the inputs, otherwise the CPU's size if that does, otherwise None."""
    return next((group for group in (_WIDE_GROUP, INT4_GROUP) if inputs % group == 0), None)


def pack_int4(weight: Tensor) -> Int4Weight:
    """Quantise a weight [out, in] or [experts, out, in] so that each group's squared error is small.

    Groups whose weights are 16 evenly spaced levels are kept exactly.

    Raises:
        ValueError: if the inputs are not a multiple of the group size, or a weight is too large for float16.
    """
    *experts, outputs, inputs = weight.shape
    group = group_size(inputs)
    if group is None:
        raise ValueError(f"{inputs} inputs cannot be packed in int4: not a multiple of {INT4_GROUP}")
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
    """Slices of outputs to work on at once, which bound the temporary memory."""
    step = max(1, _SLAB // inputs)
    return (slice(start, min(start + step, outputs)) for start in range(0, outputs, step))


def _fit(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise groups [..., group]; also returns their scale and minimum [..., 2] in float16.

    The first line goes through the smallest and the largest weight. A few more are least-squares fits to the last
    integers. The line with the smallest squared error is used.
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
