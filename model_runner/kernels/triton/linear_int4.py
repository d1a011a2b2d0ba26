"""Products of 16-bit float rows and int4 weights (W4A16)."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_runner.kernels.triton.linear import NO_ADDENDS, Addends, ExpertRows, finish
from model_runner.kernels.triton.tiles import (
    Operands,
    TileShape,
    add_product,
    choose_shape,
    place,
    row_tiles,
    rows_of_tile,
)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """int4 weights in groups of inputs, each with a scale and a minimum: w = scale * q + minimum, q from 0 to 15.

    The data that a tile of outputs needs of a group is contiguous, and a thread reads 16 bytes of it at once.
    """

    nibbles: Tensor
    """Uint8 [groups, out, group / 2], or [experts, groups, ...]. A group's first half is in the low nibbles."""
    lines: Tensor
    """Int32 [groups, out], or [experts, ...]: two float16 numbers, the scale in the low half, the minimum in the high
    half.

    They share one 32-bit word because that is the smallest asynchronous copy to shared memory."""

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.nibbles.shape[-1] * 2

    @property
    def outputs(self) -> int:
        """Outputs of one expert."""
        return self.nibbles.shape[-2]

    @property
    def inputs(self) -> int:
        """Inputs of one expert."""
        return self.nibbles.shape[-3] * self.group


@triton.jit
def _line(word):
    """Scale and offset [OUTPUTS] in float32, such that a weight is scale * (16 + q) + offset."""
    scale = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, minimum - 16.0 * scale


@triton.jit
def _dequantize(shifted, scale, offset):
    """Weights [OUTPUTS, inputs] in float32, from integers with q in bits 19 to 22.

    These bits are the upper mantissa of 16 + q, so no conversion is needed. Unpacking is all that a program computes
    besides its products, and takes longer than loading the bytes. The product of 5 and 11 bits is exact.
    """
    number = ((shifted & 0x780000) | 0x41800000).to(tl.float32, bitcast=True)
    return tl.fma(number, scale[:, None], offset[:, None])


@triton.jit(do_not_specialize=["M", "num_row_tiles"])  # do not recompile for another number of rows
def _int4_kernel(
    rows_ptr,  # [M, K]
    nibbles_ptr,  # [groups, N, INPUTS / 2], or [experts, ...]
    lines_ptr,  # [groups, N], or [experts, ...]
    out_ptr,  # [M, N]
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, N] or None
    starts_ptr,  # [experts + 1] or None
    M,
    N,
    K,
    row_stride,
    residual_stride,
    num_experts,
    num_row_tiles,
    num_output_tiles,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """Rows @ weight^T (+ bias) (+ residual), one tile per program and one group of inputs per step.

    SWAPPED: computes the transpose of that, with the weights in registers as they are unpacked.
    """
    row_tile, output_tile = place(num_row_tiles, num_output_tiles, GROUP)
    expert, first, end = rows_of_tile(row_tile, M, starts_ptr, num_experts, EXPERTS, ROWS)
    if first >= end:
        return
    HALF: tl.constexpr = INPUTS // 2
    first_output = output_tile * OUTPUTS
    m = first + tl.arange(0, ROWS)
    n = first_output + tl.arange(0, OUTPUTS)
    k = tl.arange(0, HALF)
    group = tl.cast(expert, tl.int64) * (K // INPUTS)
    row_ptrs = rows_ptr + m.to(tl.int64)[:, None] * row_stride + k[None, :]
    nibble_ptrs = nibbles_ptr + (group * N + n)[:, None] * HALF + k[None, :]
    line_ptrs = lines_ptr + group * N + n
    row_mask = (m < end)[:, None]
    output_mask = n < N
    dtype = rows_ptr.dtype.element_ty
    acc = tl.zeros((OUTPUTS, ROWS) if SWAPPED else (ROWS, OUTPUTS), dtype=tl.float32)
    for _ in range(0, K, INPUTS):
        low_rows = tl.load(row_ptrs, mask=row_mask, other=0.0)
        high_rows = tl.load(row_ptrs + HALF, mask=row_mask, other=0.0)
        pairs = tl.load(nibble_ptrs, mask=output_mask[:, None], other=0)
        scale, offset = _line(tl.load(line_ptrs, mask=output_mask, other=0))
        bits = pairs.to(tl.int32)
        acc = add_product(acc, low_rows, _dequantize(bits << 19, scale, offset).to(dtype), SWAPPED, None)
        acc = add_product(acc, high_rows, _dequantize(bits << 15, scale, offset).to(dtype), SWAPPED, None)
        row_ptrs += INPUTS
        nibble_ptrs += tl.cast(N, tl.int64) * HALF
        line_ptrs += N
    if SWAPPED:
        acc = tl.trans(acc)
    finish(acc, out_ptr, bias_ptr, residual_ptr, first, end, first_output, N, residual_stride)


def int4_operands(group: int) -> Operands:
    """Operand sizes for weights with groups of `group` inputs."""
    # Unpacking takes registers, so tiles are not wide; and time, so several programs share a multiprocessor. For one
    # row on an H200, 96 or 448 programs of 16 x 64 took a sixth less time than tiles of 64 x 32; 64 took a sixth more.
    return Operands(row_bytes=2, weight_bytes=0.5, inputs=group, widest=128, deepest_of_few=4, programs_of_few=96)


def int4_shape_for(num_rows: int, weight: Int4Weight, experts: int = 1) -> TileShape:
    """The tile shape for a number of rows."""
    return choose_shape(int4_operands(weight.group), num_rows, weight.outputs, weight.inputs, experts)


def linear_int4(
    rows: Tensor,
    weight: Int4Weight,
    out: Tensor,
    *,
    addends: Addends = NO_ADDENDS,
    experts: ExpertRows | None = None,
    shape: TileShape | None = None,
) -> Tensor:
    """Rows @ weight^T, with weights rounded to the rows' type; otherwise like linear.linear.

    Args:
        rows: [n, in] float16 or bfloat16; each row contiguous.
        weight: [out, in], or one for each expert.
        out: [n, out] contiguous, receives the result.
        addends: bias and residual; the residual may be `out` itself.
        experts: if given, each row is multiplied by the weight of its own expert.
        shape: of the tiles; chosen if None. It changes no bit.

    Returns:
        `out`.
    """
    count, inputs = rows.shape
    if count == 0:
        return out
    number = 1 if experts is None else experts.number
    shape = shape or int4_shape_for(count, weight, number)
    tiles = row_tiles(count, number, shape.rows), triton.cdiv(weight.outputs, shape.outputs)
    _int4_kernel[(tiles[0] * tiles[1],)](
        rows,
        weight.nibbles,
        weight.lines,
        out,
        addends.bias,
        addends.residual,
        None if experts is None else experts.starts,
        count,
        weight.outputs,
        inputs,
        rows.stride(0),
        0 if addends.residual is None else addends.residual.stride(0),
        number,
        *tiles,
        **shape.launch_options(None if experts is None else experts.number),
    )
    return out


def dequantize(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """The weights [..., out, in] in the type and with the rounding that products with such rows use."""
    halves = torch.stack([weight.nibbles & 15, weight.nibbles >> 4], dim=-2).float()  # [..., groups, out, 2, group / 2]
    scale, minimum = weight.lines.view(torch.float16).unflatten(-1, (-1, 2)).float().unbind(-1)
    offset = minimum - 16 * scale
    dense = (halves + 16) * scale[..., None, None] + offset[..., None, None]  # in the kernel's order
    result: Tensor = dense.transpose(-4, -3).flatten(-3).to(dtype)
    return result
