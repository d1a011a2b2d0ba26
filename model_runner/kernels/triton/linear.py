"""Products of rows and weights in 16-bit or 32-bit floats, or in fp8 with scales; of one weight or of many experts'."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_runner.kernels.triton.tiles import (
    Operands,
    TileShape,
    all_shapes,
    choose_shape,
    place,
    row_tiles,
    rows_of_tile,
)

_HALVES = Operands(row_bytes=2, weight_bytes=2)
_FP8 = Operands(row_bytes=1, weight_bytes=1, inputs=128, widest=128)  # two accumulators for each element
_FLOAT32 = TileShape(rows=16, outputs=32, inputs=32, warps=4, stages=3)
"""Without tensor cores an element is a chain of multiplications and additions in the order of the inputs. Only routers
come here, so one shape does."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Whose rows are whose, where rows are sorted by expert."""

    starts: Tensor
    """Int32 [experts + 1]: each expert's first row, and the number of all rows; on the device."""

    @property
    def number(self) -> int:
        """Of experts."""
        return self.starts.shape[0] - 1


@dataclass(frozen=True, slots=True)
class Scales:
    """What the numbers of an fp8 product are multiplied by."""

    rows: Tensor
    """Float32 [n]."""
    weight: Tensor
    """Float32 [out], or [experts, out]."""


@dataclass(frozen=True, slots=True)
class Addends:
    """What is added to a product in float32, before the one rounding of the result."""

    bias: Tensor | None = None
    """[out]."""
    residual: Tensor | None = None
    """[n, out], each row contiguous."""


NO_ADDENDS = Addends()
_PROMOTE = 128
"""Hopper's fp8 products keep about 14 bits of a sum: one of a step's inputs is then added to the whole in float32."""


@triton.jit
def finish(acc, out_ptr, bias_ptr, residual_ptr, first, end, first_output, N, residual_stride):
    """Add bias and residual to float32 sums [ROWS, OUTPUTS], round once, and store those of rows before the end.

    The sums of the widest tiles leave no registers for as many residuals: they are finished one half after the other.
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
    # The tile's place in 64 bits, a number's place in the tile in 32, which takes fewer registers.
    row = tl.cast(first, tl.int64)
    if residual_ptr is not None:
        residual_tile = residual_ptr + row * residual_stride + first_output
        acc += tl.load(residual_tile + m * residual_stride + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + first_output + m * N + n, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "num_row_tiles"])  # the number of rows is no reason to compile again
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
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WHOLE: tl.constexpr,
    PROMOTE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Rows @ weight^T (* scales) (+ bias) (+ residual); one tile for each program.

    WHOLE: K is a multiple of INPUTS. PROMOTE: inputs after which a sum is added to one in full float32, for fp8.
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
    # Rows beyond the end are not read, which for a single row saves 63 of 64.
    row_ptrs = rows_ptr + m.to(tl.int64)[:, None] * row_stride + k[None, :]
    weight_ptrs = weight_ptr + (of_expert + n)[:, None] * weight_stride + k[None, :]
    row_mask = (m < end)[:, None]
    weight_mask = (n < N)[:, None]
    acc = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, K, INPUTS):
        if WHOLE:
            x = tl.load(row_ptrs, mask=row_mask, other=0.0)
            w = tl.load(weight_ptrs, mask=weight_mask, other=0.0)
        else:
            within = (start + k < K)[None, :]
            x = tl.load(row_ptrs, mask=row_mask & within, other=0.0)
            w = tl.load(weight_ptrs, mask=weight_mask & within, other=0.0)
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision="ieee", max_num_imprecise_acc=PROMOTE)
        row_ptrs += INPUTS
        weight_ptrs += INPUTS
    if row_scale_ptr is not None:
        weight_scale = tl.load(weight_scale_ptr + of_expert + n, mask=n < N, other=0.0)
        acc *= tl.load(row_scale_ptr + m, mask=m < end, other=0.0)[:, None] * weight_scale[None, :]
    finish(acc, out_ptr, bias_ptr, residual_ptr, first, end, first_output, N, residual_stride)


def shapes(dtype: torch.dtype, inputs: int) -> list[TileShape]:
    """All shapes of tiles for rows of a type."""
    return [_FLOAT32] if dtype == torch.float32 else all_shapes(_FP8 if dtype.itemsize == 1 else _HALVES, inputs)


def shape_for(rows: Tensor, weight: Tensor, experts: int = 1, num_rows: int | None = None) -> TileShape:
    """The shape of tiles for a product, as if it had `num_rows` rows; see tiles.py for why any other gives the same."""
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
    experts: Experts | None = None,
    shape: TileShape | None = None,
) -> Tensor:
    """Rows @ weight^T with float32 sums, plus bias and residual; a row's result depends on no other row.

    Args:
        rows: [n, in] float16, bfloat16, float32, or float8_e4m3fn with scales; each row contiguous.
        weight: [out, in], contiguous; with `experts` [experts, out, in]. Of the rows' type, or cast to it.
        out: [n, out] contiguous, receives the result.
        addends: bias and residual; the residual may be `out` itself.
        scales: of fp8 rows and weights.
        experts: if given, each row is multiplied with the weight of its own expert.
        shape: of the tiles; None chooses it. It changes no bit.

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
