"""Linear layers in 16-bit or 32-bit floats or in scaled fp8, for one weight or many experts; and gated activations."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_runner.kernels.triton.tiles import (
    Operands,
    TileShape,
    add_product,
    all_shapes,
    choose_shape,
    place,
    row_tiles,
    rows_of_tile,
)

_HALVES = Operands(row_bytes=2, weight_bytes=2)
_FP8 = Operands(row_bytes=1, weight_bytes=1, inputs=128, widest=128)  # two accumulators per element
_FLOAT32 = TileShape(rows=16, outputs=32, inputs=32, warps=4, stages=3)
"""Without tensor cores an element is a chain of multiply-adds in the order of inputs. Only routers use float32, so one
shape is enough."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Assignment of rows to experts; rows are sorted by expert."""

    starts: Tensor
    """Int32 [experts + 1] on the device: each expert's first row, and the total number of rows."""

    @property
    def number(self) -> int:
        """Number of experts."""
        return self.starts.shape[0] - 1


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of an fp8 product."""

    rows: Tensor
    """Float32 [n]."""
    weight: Tensor
    """Float32 [out], or [experts, out]."""


@dataclass(frozen=True, slots=True)
class Addends:
    """Terms added to a product in float32, before the result is rounded once."""

    bias: Tensor | None = None
    """[out]."""
    residual: Tensor | None = None
    """[n, out], each row contiguous."""


NO_ADDENDS = Addends()
_PROMOTE = 128
"""Inputs after which a partial sum is added to the total in float32: Hopper's fp8 products keep only about 14 bits."""


@triton.jit
def finish(acc, out_ptr, bias_ptr, residual_ptr, first, end, first_output, N, residual_stride):
    """Add bias and residual to float32 sums [ROWS, OUTPUTS], round once, and store the rows before `end`.

    The widest tiles leave no registers for that many residuals, so they are finished one half at a time.
    """
    if acc.shape[1] > 128:
        half: tl.constexpr = acc.shape[1] // 2
        low, high = tl.split(acc.reshape(acc.shape[0], 2, half).permute(0, 2, 1))
        _finish_part(low, out_ptr, bias_ptr, residual_ptr, first, end, first_output, N, residual_stride)
        _finish_part(high, out_ptr, bias_ptr, residual_ptr, first, end, first_output + half, N, residual_stride)
    else:
        _finish_part(acc, out_ptr, bias_ptr, residual_ptr, first, end, first_output, N, residual_stride)


@triton.jit
def _finish_part(acc, out_ptr, bias_ptr, residual_ptr, first, end, first_output, N, residual_stride):
    m = tl.arange(0, acc.shape[0])[:, None]
    n = tl.arange(0, acc.shape[1])[None, :]
    is_output = first_output + n < N
    inside = (first + m < end) & is_output
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + first_output + n, mask=is_output, other=0.0).to(tl.float32)
    # The tile's address needs 64 bits; an offset in the tile fits in 32, which saves registers.
    row = tl.cast(first, tl.int64)
    if residual_ptr is not None:
        residual_tile = residual_ptr + row * residual_stride + first_output
        acc += tl.load(residual_tile + m * residual_stride + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + first_output + m * N + n, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "num_row_tiles"])  # do not recompile for another number of rows
def _linear_kernel(
    rows_ptr,  # [M, K]
    weight_ptr,  # [N, K], or [experts, N, K]
    out_ptr,  # [M, N]
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, N] or None
    row_scale_ptr,  # [M] or None
    weight_scale_ptr,  # [N], or [experts, N], or None
    starts_ptr,  # [experts + 1] or None
    M,
    N,
    K,
    row_stride,
    weight_stride,
    residual_stride,
    num_experts,
    num_row_tiles,
    num_output_tiles,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, WHOLE: tl.constexpr,
    PROMOTE: tl.constexpr, GROUP: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """Rows @ weight^T (* scales) (+ bias) (+ residual), one tile per program.

    SWAPPED: computes the transpose of that. WHOLE: K is a multiple of INPUTS. PROMOTE: for fp8, inputs after which a
    sum is added to one in full float32.
    """
    row_tile, output_tile = place(num_row_tiles, num_output_tiles, GROUP)
    expert, first, end = rows_of_tile(row_tile, M, starts_ptr, num_experts, EXPERTS, ROWS)
    if first >= end:
        return
    first_output = output_tile * OUTPUTS
    m = first + tl.arange(0, ROWS)
    n = first_output + tl.arange(0, OUTPUTS)
    k = tl.arange(0, INPUTS)
    of_expert = tl.cast(expert, tl.int64) * N
    # Rows beyond the end are not read; for a single row this saves 63 of 64.
    row_ptrs = rows_ptr + m.to(tl.int64)[:, None] * row_stride + k[None, :]
    weight_ptrs = weight_ptr + (of_expert + n)[:, None] * weight_stride + k[None, :]
    row_mask = (m < end)[:, None]
    weight_mask = (n < N)[:, None]
    acc = tl.zeros((OUTPUTS, ROWS) if SWAPPED else (ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, K, INPUTS):
        if WHOLE:
            x = tl.load(row_ptrs, mask=row_mask, other=0.0)
            w = tl.load(weight_ptrs, mask=weight_mask, other=0.0)
        else:
            within = (start + k < K)[None, :]
            x = tl.load(row_ptrs, mask=row_mask & within, other=0.0)
            w = tl.load(weight_ptrs, mask=weight_mask & within, other=0.0)
        acc = add_product(acc, x, w.to(x.dtype), SWAPPED, PROMOTE)
        row_ptrs += INPUTS
        weight_ptrs += INPUTS
    if SWAPPED:
        acc = tl.trans(acc)
    if row_scale_ptr is not None:
        weight_scale = tl.load(weight_scale_ptr + of_expert + n, mask=n < N, other=0.0)
        acc *= tl.load(row_scale_ptr + m, mask=m < end, other=0.0)[:, None] * weight_scale[None, :]
    finish(acc, out_ptr, bias_ptr, residual_ptr, first, end, first_output, N, residual_stride)


def shapes(dtype: torch.dtype, inputs: int) -> list[TileShape]:
    """All tile shapes for rows of a type."""
    return [_FLOAT32] if dtype == torch.float32 else all_shapes(_FP8 if dtype.itemsize == 1 else _HALVES, inputs)


def shape_for(rows: Tensor, weight: Tensor, experts: int = 1, num_rows: int | None = None) -> TileShape:
    """The tile shape for a product with `num_rows` rows (by default those given). All shapes give the same bits."""
    if rows.dtype == torch.float32:
        return _FLOAT32
    operands = _FP8 if rows.dtype.itemsize == 1 else _HALVES
    count = rows.shape[0] if num_rows is None else num_rows
    return choose_shape(operands, count, weight.shape[-2], weight.shape[-1], experts)


def linear(
    rows: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    addends: Addends = NO_ADDENDS,
    scales: Scales | None = None,
    experts: ExpertRows | None = None,
    shape: TileShape | None = None,
) -> Tensor:
    """Rows @ weight^T with float32 sums, plus bias and residual. A row's result depends on no other row.

    Args:
        rows: [n, in] float16, bfloat16, float32, or float8_e4m3fn with scales; each row contiguous.
        weight: [out, in], contiguous; with `experts` [experts, out, in]. Of the rows' type, or cast to it.
        out: [n, out] contiguous, receives the result.
        addends: bias and residual; the residual may be `out` itself.
        scales: of fp8 rows and weights.
        experts: if given, each row is multiplied by the weight of its own expert.
        shape: of the tiles; chosen if None. It changes no bit.

    Returns:
        `out`.
    """
    count, inputs = rows.shape
    if count == 0:
        return out
    number = 1 if experts is None else experts.number
    shape = shape or shape_for(rows, weight, number)
    tiles = row_tiles(count, number, shape.rows), triton.cdiv(weight.shape[-2], shape.outputs)
    _linear_kernel[(tiles[0] * tiles[1],)](
        rows,
        weight,
        out,
        addends.bias,
        addends.residual,
        None if scales is None else scales.rows,
        None if scales is None else scales.weight,
        None if experts is None else experts.starts,
        count,
        weight.shape[-2],
        inputs,
        rows.stride(0),
        weight.stride(-2),
        0 if addends.residual is None else addends.residual.stride(0),
        number,
        *tiles,
        WHOLE=inputs % shape.inputs == 0,
        PROMOTE=None if scales is None else _PROMOTE,
        **shape.launch_options(None if experts is None else experts.number),
    )
    return out


FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest e4m3 number."""


@triton.jit
def _quantize_kernel(rows_ptr, out_ptr, scale_ptr, K, row_stride, BLOCK: tl.constexpr):
    """Quantise one row per program. The largest magnitude does not depend on the order of the values."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        x = tl.load(rows_ptr + row * row_stride + start + k, mask=start + k < K, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    scale = tl.div_rn(tl.max(largest, 0), 448.0)
    scale = tl.where(scale > 0, scale, 1.0)  # rows of zeros, or so small that the division underflows
    tl.store(scale_ptr + row, scale)
    for start in range(0, K, BLOCK):
        x = tl.load(rows_ptr + row * row_stride + start + k, mask=start + k < K, other=0.0)
        # even an exact division can exceed the largest number through its own rounding
        scaled = tl.div_rn(x.to(tl.float32), scale)
        scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out_ptr + row * K + start + k, scaled.to(out_ptr.dtype.element_ty), mask=start + k < K)


def quantize_rows(rows: Tensor, out: Tensor, scales: Tensor) -> None:
    """Round each row to fp8 such that its largest magnitude becomes 448. NaN stays NaN.

    Args:
        rows: [n, in] float16, bfloat16 or float32; each row contiguous.
        out: [n, in] float8_e4m3fn contiguous, receives the quantised rows.
        scales: [n] float32, receives the factors that restore the rows.
    """
    count, inputs = rows.shape
    if count == 0:
        return
    block = min(4096, triton.next_power_of_2(inputs))
    _quantize_kernel[(count,)](
        rows, out, scales, inputs, rows.stride(0), BLOCK=block, num_warps=8, enable_fp_fusion=False
    )


@triton.jit
def _expert_sum_kernel(
    outputs_ptr,  # [T * RANKS, H]
    place_ptr,  # [T, RANKS]
    weight_ptr,  # [T, RANKS]
    out_ptr,  # [T, H]
    H,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in range(RANKS):
        row = tl.load(place_ptr + token * RANKS + rank).to(tl.int64)
        weight = tl.load(weight_ptr + token * RANKS + rank).to(tl.float32)
        acc += tl.load(outputs_ptr + row * H + h, mask=h < H, other=0.0).to(tl.float32) * weight
    tl.store(out_ptr + token * H + h, acc.to(out_ptr.dtype.element_ty), mask=h < H)


def expert_sum(outputs: Tensor, places: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Weighted sums in float32, added in the order of the token's ranks and rounded once.

    Args:
        outputs: [T * k, hidden] contiguous.
        places: [T, k] contiguous integers: the row of `outputs` for the token's k-th expert.
        weights: [T, k] contiguous.
        out: [T, hidden] contiguous, receives the sums.

    Returns:
        `out`.
    """
    tokens, hidden = out.shape
    if tokens == 0:
        return out
    block = min(1024, triton.next_power_of_2(hidden))
    _expert_sum_kernel[(tokens, triton.cdiv(hidden, block))](
        outputs, places, weights, out, hidden, RANKS=places.shape[1], BLOCK=block, num_warps=4, enable_fp_fusion=False
    )
    return out


_BLOCK = 1024
"""Values per program, 8 for each thread of its 4 warps: one 16-byte access in half precision."""


def activate_and_multiply(gate_up: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
    """Activation(gate) * up, in float32 and rounded once.

    Args:
        gate_up: [n, 2 * intermediate], gate then up; rows may have any stride.
        activation: "silu" or "gelu_tanh".
        out: [n, intermediate], contiguous; receives the result, if given.

    Returns:
        [n, intermediate] of the type of gate_up.
    """
    num_rows, width = gate_up.shape
    width //= 2
    if out is None:
        out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        _gate_kernel[grid](gate_up, out, gate_up.stride(0), width, ACTIVATION=activation, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """The activation of x. silu(x) = x sigmoid(x), and gelu_tanh uses 1 + tanh(y) = 2 sigmoid(2 y)."""
    if ACTIVATION == "silu":
        y = x
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        y = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
    e = tl.exp(-tl.abs(y))  # at most 1
    return x * tl.where(y >= 0, 1.0, e) / (1 + e)


@triton.jit
def _gate_kernel(gate_up, out, row_stride, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Process BLOCK values of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    place = gate_up + row * row_stride + column
    gate = tl.load(place, mask, 0.0).to(tl.float32)
    up = tl.load(place + width, mask, 0.0).to(tl.float32)
    tl.store(out + row * width + column, (_activated(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask)
