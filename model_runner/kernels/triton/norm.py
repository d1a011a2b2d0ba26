"""RMS norms of rows, with what a decoder layer does just before them: the residual addition.

All arithmetic is in float32, and each result is rounded once, when it is stored. Transformers' Llama rounds once more,
before it multiplies with the weight, so in half precision the last bit may differ from it.

A row's result depends on nothing but the row: the tile that a program works on, and so the order in which a row's
squares are added, is a function of the row's width alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_runner.kernels.triton.tiles import regular_rows

_TILE = 1024
"""Numbers that a program has at the least: narrow rows, such as heads, are taken several at a time."""
_WIDEST = 16384
"""Beyond it a row does not fit in the registers of a block."""
_PER_WARP = 512
"""16 numbers for each thread: two accesses of 16 bytes in half precision."""
_MOST_WARPS = 16
"""With more, a thread has too few registers for the widest rows."""


def rms_norm(
    rows: Tensor, factor: Tensor, eps: float, *, is_centred: bool = False, out: Tensor | None = None
) -> Tensor:
    """RMS norm: x / sqrt(mean(x²) + eps) * factor.

    Args:
        rows: [n, hidden], of any stride.
        factor: [hidden].
        eps: added to the mean.
        is_centred: the mean of the row is subtracted from x before all this (layer norm without a bias).
        out: [n, hidden], contiguous; where the result goes.

    Returns:
        [n, hidden] of the type of the rows.

    Raises:
        ValueError: for rows that are too wide.
    """
    out = _empty(rows) if out is None else out
    _launch(rows, None, None, factor, None, out, 1.0, eps, is_centred)
    return out


def add_and_norm(
    rows: Tensor, added: Tensor, scale: float, post_factor: Tensor | None, factor: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """A residual addition, and the norm of its result, which is rounded before.

    Args:
        rows: [n, hidden] the residual stream, of any stride.
        added: [n, hidden] what is added to it, of any stride.
        scale: times this.
        post_factor: [hidden] if `added` is first normed itself.
        factor: [hidden] of the norm of the sum; None if that is not wanted.
        eps: of both norms.

    Returns:
        The sum and its norm, each [n, hidden].

    Raises:
        ValueError: for rows that are too wide.
    """
    total = _empty(rows)
    out = None if factor is None else _empty(rows)
    _launch(rows, added, post_factor, factor, total, out, scale, eps, is_centred=False)
    return total, out


def _empty(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)


def _launch(
    rows: Tensor,
    added: Tensor | None,
    post_factor: Tensor | None,
    factor: Tensor | None,
    total: Tensor | None,
    out: Tensor | None,
    scale: float,
    eps: float,
    is_centred: bool,
) -> None:
    num_rows, hidden = rows.shape
    if hidden > _WIDEST:
        raise ValueError(f"rows of {hidden:,} numbers are wider than the norm takes, which is {_WIDEST:,}")
    if not num_rows:
        return
    rows, stride = regular_rows(rows)
    added, added_stride = (None, 0) if added is None else regular_rows(added)
    block = triton.next_power_of_2(hidden)
    at_once = max(1, _TILE // block)
    _norm_kernel[(triton.cdiv(num_rows, at_once),)](
        rows,
        added,
        post_factor,
        factor,
        total,
        out,
        stride,
        added_stride,
        num_rows,
        scale,
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        ROWS=at_once,
        IS_CENTRED=is_centred,
        num_warps=min(max(1, at_once * block // _PER_WARP), _MOST_WARPS),
    )


@triton.jit
def _factor(factor, dim, HIDDEN: tl.constexpr):
    """[1, BLOCK] float32. Load it before the sum that it is for, which no load is moved across, so as not to wait."""
    return tl.load(factor + dim, dim < HIDDEN, 0.0).to(tl.float32)[None, :]


@triton.jit
def _normed(x, factor, dim, eps, HIDDEN: tl.constexpr, IS_CENTRED: tl.constexpr):
    """X [ROWS, BLOCK] float32, 0 beyond HIDDEN, by its root mean square, times the factor [1, BLOCK]."""
    if IS_CENTRED:
        x = tl.where((dim < HIDDEN)[None, :], x - (tl.sum(x, 1) / HIDDEN)[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / HIDDEN + eps)  # [ROWS]
    return x * inverse[:, None] * factor


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    rows,  # [num_rows, HIDDEN]
    added,  # [num_rows, HIDDEN] or None
    post_factor,  # [HIDDEN] or None
    factor,  # [HIDDEN] or None if no norm is wanted
    total,  # [num_rows, HIDDEN] where rows + scale * added goes, or None
    out,  # [num_rows, HIDDEN] where it goes
    row_stride,
    added_stride,
    num_rows,
    scale,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    IS_CENTRED: tl.constexpr,
):
    """ROWS rows, each as a whole in the registers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    dim = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (dim < HIDDEN)[None, :]
    own = row[:, None] * HIDDEN + dim[None, :]
    x = tl.load(rows + row[:, None] * row_stride + dim[None, :], mask, 0.0).to(tl.float32)
    if added is not None:
        y = tl.load(added + row[:, None] * added_stride + dim[None, :], mask, 0.0).to(tl.float32)
        if post_factor is not None:
            y = _normed(y, _factor(post_factor, dim, HIDDEN), dim, eps, HIDDEN, IS_CENTRED)
        rounded = (x + scale * y).to(total.dtype.element_ty)
        tl.store(total + own, rounded, mask)
        x = rounded.to(tl.float32)
    if factor is not None:
        x = _normed(x, _factor(factor, dim, HIDDEN), dim, eps, HIDDEN, IS_CENTRED)
        tl.store(out + own, x.to(out.dtype.element_ty), mask)
