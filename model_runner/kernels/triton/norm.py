"""RMS norms of rows, fused with the residual addition before them.

All arithmetic is in float32, and each result is rounded once, when it is stored. Transformers' Llama also rounds before
it multiplies by the weight, so in half precision the last bit may differ.

A row's result depends only on the row: the row's width alone determines a program's tile, and so the order in which
squares are added.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_runner.kernels.triton.tiles import regular_rows

_TILE = 1024
"""Minimum number of values per program: narrow rows, such as heads, are processed several at a time."""
_WIDEST = 16384
"""Widest supported row. A wider one does not fit in the registers of a thread block."""
_PER_WARP = 512
"""Values per warp, 16 for each thread: two 16-byte accesses in half precision."""
_MOST_WARPS = 16
"""With more warps, a thread has too few registers for the widest rows."""


def rms_norm(
    rows: Tensor, factor: Tensor, eps: float, *, is_centred: bool = False, out: Tensor | None = None
) -> Tensor:
    """RMS norm: x / sqrt(mean(x²) + eps) * factor.

    Args:
        rows: [n, hidden], of any stride.
        factor: [hidden].
        eps: added to the mean.
        is_centred: first subtract the row's mean from x (layer norm without a bias).
        out: [n, hidden], contiguous; receives the result, if given.

    Returns:
        [n, hidden] of the type of the rows.

    Raises:
        ValueError: if the rows are too wide.
    """
    out = _empty(rows) if out is None else out
    _launch(rows, None, None, factor, None, out, 1.0, eps, is_centred)
    return out


def add_and_norm(
    rows: Tensor, added: Tensor, scale: float, post_factor: Tensor | None, factor: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Add to the residual stream, and norm the rounded sum.

    Args:
        rows: [n, hidden] residual stream, of any stride.
        added: [n, hidden] what to add, of any stride.
        scale: factor on `added`.
        post_factor: [hidden] factor of a norm applied to `added` first; None for no such norm.
        factor: [hidden] factor of the norm of the sum; None for no such norm.
        eps: of both norms.

    Returns:
        The sum, and its norm or None, each [n, hidden].

    Raises:
        ValueError: if the rows are too wide.
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
    """The norm's factor, [1, BLOCK] float32. Load it before the sum: loads are not moved across a reduction."""
    return tl.load(factor + dim, dim < HIDDEN, 0.0).to(tl.float32)[None, :]


@triton.jit
def _normed(x, factor, dim, eps, HIDDEN: tl.constexpr, IS_CENTRED: tl.constexpr):
    """X [ROWS, BLOCK] float32, 0 beyond HIDDEN, divided by its root mean square and times factor [1, BLOCK]."""
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
    total,  # [num_rows, HIDDEN] receives rows + scale * added, or None
    out,  # [num_rows, HIDDEN] receives the norm, or None
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
    """Process ROWS rows, each entirely in registers."""
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
