"""The gate of an MLP."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Numbers of a program: 8 for each thread of its 4 warps, an access of 16 bytes in half precision."""


def activate_and_multiply(gate_up: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
    """Activation(gate) * up, in float32 and rounded once.

    Args:
        gate_up: [n, 2 * intermediate] gate and up side by side; rows of any stride.
        activation: "silu" or "gelu_tanh".
        out: [n, intermediate], contiguous; where the result goes.

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
    """Silu is x sigmoid(x), and 1 + tanh(y), of which gelu_tanh is made, 2 sigmoid(2 y)."""
    if ACTIVATION == "silu":
        y = x
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        y = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
    e = tl.exp(-tl.abs(y))  # at most 1
    return x * tl.where(y >= 0, 1.0, e) / (1 + e)


@triton.jit
def _gate_kernel(gate_up, out, row_stride, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK numbers of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    place = gate_up + row * row_stride + column
    gate = tl.load(place, mask, 0.0).to(tl.float32)
    up = tl.load(place + width, mask, 0.0).to(tl.float32)
    tl.store(out + row * width + column, (_activated(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask)
