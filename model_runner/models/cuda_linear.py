"""Products of rows and weights on CUDA, and what the weights are stored as."""

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
from model_runner.models.experts import take_expert_weights


class GpuProduct(Protocol):
    """Multiplies rows with one weight [out, in]."""

    def __call__(self, rows: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Rows [n, in] -> rows @ weight.T + bias + residual, [n, out] as the residual; rounded once."""
        ...


MakeProduct = Callable[[Tensor], GpuProduct]
"""Takes a weight [out, in], which may be freed afterwards."""


GpuWeightKind = Literal["fp8", "int4"]
"""fp8 has one scale for each output and one for each row; int4 a scale and a minimum for each output and group."""


class CublasProduct:
    """A weight [out, in] as it is. A row's result depends on the number of rows: not for exact mode."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, rows: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        weight = self._weight.to(rows.dtype)
        if residual is None:
            return F.linear(rows, weight, bias)
        return torch.addmm(residual if bias is None else residual + bias, rows, weight.t())


class TiledProduct(ABC):
    """By our kernels, with a weight [out, in], or [experts, out, in]. A row's result depends on no other row."""

    def __init__(self, *, one_shape: bool) -> None:
        """With `one_shape` all numbers of rows go through the same tiles, where tile_shapes_agree is False."""
        self._one_shape = one_shape

    def __call__(
        self,
        rows: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        experts: ExpertRows | None = None,
    ) -> Tensor:
        """See GpuProduct; with `experts`, each row is multiplied with the weight of its own."""
        return self._multiply(_plain(rows), _addends(bias, residual), experts)

    @abstractmethod
    def _multiply(self, rows: Tensor, addends: Addends, experts: ExpertRows | None) -> Tensor:
        """The same of rows that are contiguous each."""


class TritonProduct(TiledProduct):
    """A weight as it is. Rows have its type, or are float32."""

    def __init__(self, weight: Tensor, *, one_shape: bool = False) -> None:
        """The weight is kept, not copied, if it is contiguous."""
        super().__init__(one_shape=one_shape)
        self._weight = weight.detach().contiguous()

    def _multiply(self, rows: Tensor, addends: Addends, experts: ExpertRows | None) -> Tensor:
        shape = shape_for(rows, self._weight, num_rows=1) if self._one_shape else None
        out = rows.new_empty(rows.shape[0], self._weight.shape[-2])
        return linear(rows, self._weight, out, addends=addends, experts=experts, shape=shape)


class Fp8Product(TiledProduct):
    """A weight in e4m3 with a scale for each output; rows, of any floating type, are rounded to e4m3 too.

    Both scales make the largest magnitude 448.
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
    """A weight in int4; in a product it has the rows' type, float16 or bfloat16."""

    def __init__(self, weight: Tensor, *, one_shape: bool = False) -> None:
        super().__init__(one_shape=one_shape)
        self.weight = pack_int4(weight.detach())

    def _multiply(self, rows: Tensor, addends: Addends, experts: ExpertRows | None) -> Tensor:
        if rows.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"weights in int4 are not multiplied with rows in {rows.dtype}")
        shape = int4_shape_for(1, self.weight) if self._one_shape else None
        out = rows.new_empty(rows.shape[0], self.weight.outputs)
        return linear_int4(rows, self.weight, out, addends=addends, experts=experts, shape=shape)


def make_tiled_product(weight: Tensor, kind: GpuWeightKind | None, *, one_shape: bool = False) -> TiledProduct:
    """The product with a weight [out, in], or [experts, out, in], as a kind; dense if int4 has no whole groups."""
    if kind == "fp8":
        return Fp8Product(weight, one_shape=one_shape)
    if kind == "int4" and group_size(weight.shape[-1]) is not None:
        return Int4Product(weight, one_shape=one_shape)
    return TritonProduct(weight, one_shape=one_shape)


def make_product(weight: Tensor, kind: GpuWeightKind | None, *, exact: bool, one_shape: bool = False) -> GpuProduct:
    """The product with a weight [out, in] as a kind; what stays dense is for cuBLAS unless results are to be exact."""
    product = make_tiled_product(weight, kind, one_shape=one_shape)
    return CublasProduct(weight.detach()) if isinstance(product, TritonProduct) and not exact else product


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [..., out, in] in e4m3, and the scales [..., out] by which its outputs are to be multiplied, float32."""
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
    """Do all shapes of tiles give the same results, bit for bit, on this GPU? See kernels/triton/tiles.py.

    Args:
        device: of the products.
        dtype: of the rows: float16, bfloat16, or float8_e4m3fn.
    """
    return all(_shapes_agree(device, dtype, inputs) for inputs in (1056, 1152))  # the second is whole steps


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
    """With contiguous rows, however far apart they are."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _addends(bias: Tensor | None, residual: Tensor | None) -> Addends:
    return Addends(bias, None if residual is None else _plain(residual))


GROUPED_EXPERTS_NAME = "samewise_grouped"


def register_grouped_experts() -> None:
    """Make `grouped_experts` known to transformers under GROUPED_EXPERTS_NAME, if nothing is: see compile_layers."""
    if GROUPED_EXPERTS_NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(GROUPED_EXPERTS_NAME, grouped_experts)


class GroupedExperts:
    """The weights of all experts of one layer."""

    def __init__(self, gate_up: Tensor, down: Tensor, kind: GpuWeightKind | None, *, one_shape: bool = False) -> None:
        """Takes gate_up [experts, 2 * intermediate, hidden] and down [experts, hidden, intermediate]."""
        self.gate_up = make_tiled_product(gate_up, kind, one_shape=one_shape)
        self.down = make_tiled_product(down, kind, one_shape=one_shape)
        self.bounds = torch.arange(len(gate_up) + 1, device=gate_up.device)


def grouped_experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum of the chosen experts' outputs, added in the order of each token's ranks.

    A token's result depends on no other token: neither its products nor its sum know where the others stand.

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
    gated = module._apply_gate(grouped.gate_up(rows, experts=experts))  # type: ignore[operator]
    outputs = grouped.down(gated, experts=experts)
    return expert_sum(
        outputs, places.view(top_k_index.shape), top_k_weights.contiguous(), hidden.new_empty(hidden.shape)
    )


def group_experts(model: nn.Module, kind: GpuWeightKind | None, *, one_shape: bool = False) -> None:
    """Prepare the experts of every layer that has them.

    Raises:
        ValueError: if the experts are laid out in a way that is not supported.
    """
    for module, gate_up, down in take_expert_weights(model):
        module.grouped = GroupedExperts(gate_up, down, kind, one_shape=one_shape)


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
