"""Rounding rows to fp8, one scale for each row: the left side of a product in fp8 (W8A8)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of e4m3."""


@triton.jit
def _quantize_kernel(rows_ptr, out_ptr, scale_ptr, K, row_stride, BLOCK: tl.constexpr):
    """One row for each program. The largest magnitude is the same in any order."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        x = tl.load(rows_ptr + row * row_stride + start + k, mask=start + k < K, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    scale = tl.div_rn(tl.max(largest, 0), 448.0)
    scale = tl.where(scale > 0, scale, 1.0)  # a row of zeros, or of what float32 cannot divide
    tl.store(scale_ptr + row, scale)
    for start in range(0, K, BLOCK):
        x = tl.load(rows_ptr + row * row_stride + start + k, mask=start + k < K, other=0.0)
        # An exact division can exceed the largest number by its own rounding.
        scaled = tl.div_rn(x.to(tl.float32), scale)
        scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out_ptr + row * K + start + k, scaled.to(out_ptr.dtype.element_ty), mask=start + k < K)


def quantize_rows(rows: Tensor, out: Tensor, scales: Tensor) -> None:
    """Round each row to fp8 such that its largest magnitude becomes 448. What is no number stays so.

    Args:
        rows: [n, in] float16, bfloat16 or float32; each row contiguous.
        out: [n, in] float8_e4m3fn contiguous, receives the numbers.
        scales: [n] float32, receives what they are to be multiplied by.
    """
    count, inputs = rows.shape
    if count == 0:
        return
    block = min(4096, triton.next_power_of_2(inputs))
    _quantize_kernel[(count,)](
        rows, out, scales, inputs, rows.stride(0), BLOCK=block, num_warps=8, enable_fp_fusion=False
    )
