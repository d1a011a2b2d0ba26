"""Rotary embedding and KV write: from the merged QKV product to what attention reads, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_runner.kernels.triton.kv_write import CacheLayer, heads_at_once, num_warps, store_heads
from model_runner.kernels.triton.tiles import regular_rows


def rotate_and_write(
    qkv: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None,
    head_norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    slots: Tensor,
    cache: CacheLayer,
    out: Tensor | None = None,
) -> Tensor:
    """Norm and rotate the heads of queries and keys, and write keys and values into the cache.

    Rotated dimensions are paired across the two halves of the rotary dimensions (NeoX style); further dimensions are
    unchanged. Arithmetic is in float32 and its result is rounded once to the type of qkv; the cache then stores that as
    write_kv does.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * head_dim] heads of queries, keys and values; rows may have any stride.
        cos_sin: each [T, rotary_dim]; None for a layer without rotation.
        head_norms: factors [head_dim] of the RMS norms of the queries' and keys' heads; None for no norm.
        eps: of these norms.
        slots: [T] int64, as in write_kv.
        cache: where keys and values are stored; same head_dim.
        out: [T, heads, head_dim], contiguous; receives the queries, if given.

    Returns:
        The queries [T, heads, head_dim].
    """
    num_tokens = len(qkv)
    kv_heads, block_size, head_dim = cache.values.shape[1:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if out is None:
        out = torch.empty((num_tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return out
    at_once = heads_at_once(heads, head_dim)
    query_groups, kv_groups = triton.cdiv(heads, at_once), triton.cdiv(kv_heads, at_once)
    qkv, stride = regular_rows(qkv)
    (cos, cos_stride), (sin, sin_stride) = [(None, 0)] * 2 if cos_sin is None else map(regular_rows, cos_sin)
    _rotate_kernel[num_tokens, query_groups + 2 * kv_groups](
        qkv,
        cos,
        sin,
        *head_norms,
        slots,
        out,
        *cache,
        (stride, cos_stride, sin_stride),
        eps,
        *cache.strides,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        ROTARY_DIM=0 if cos is None else cos.shape[1],
        BLOCK_SIZE=block_size,
        HEADS_AT_ONCE=at_once,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=num_warps(at_once, head_dim),
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _rotated(
    row,
    head,
    cos,
    sin,
    factor,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Vectors [n, BLOCK] float32 of these heads [n] of a row, normed and rotated."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    dim = tl.arange(0, BLOCK)
    other = dim + tl.where(dim < HALF, HALF, tl.where(dim < ROTARY_DIM, -HALF, 0))  # its partner
    mask = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    x = tl.load(row + head[:, None] * DIM + dim[None, :], mask, 0.0).to(tl.float32)
    if ROTARY_DIM > 0:
        y = tl.load(row + head[:, None] * DIM + other[None, :], mask, 0.0).to(tl.float32)
        # Loaded for each head, so that threads hold them in the layout of x and need no exchange.
        turn = 0 * head[:, None] + dim[None, :]
        c = tl.load(cos + turn, turn < ROTARY_DIM, 1.0).to(tl.float32)
        s = tl.load(sin + turn, turn < ROTARY_DIM, 0.0).to(tl.float32)
        s = tl.where(turn < HALF, -s, s)
    if factor is not None:
        weight = tl.load(factor + dim, dim < DIM, 0.0).to(tl.float32)[None, :]
        other_weight = tl.load(factor + other, dim < DIM, 0.0).to(tl.float32)[None, :]
        inverse = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = x * inverse * weight
        if ROTARY_DIM > 0:
            y = y * inverse * other_weight
    if ROTARY_DIM > 0:
        x = x * c + y * s
    return x


@triton.jit
def _rotate_kernel(
    qkv,  # [T, (HEADS + 2 * KV_HEADS) * DIM]
    cos,  # [T, ROTARY_DIM] or None
    sin,
    query_factor,  # [DIM] or None
    key_factor,
    slots,  # [T]
    query,  # [T, HEADS, DIM]
    keys,
    values,
    key_scales,
    value_scales,
    row_strides,  # of qkv, cos, sin
    eps,
    keys_strides,
    values_strides,
    scale_strides,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process some heads of one token: of its queries, its keys or its values."""
    QUERY_GROUPS: tl.constexpr = (HEADS + HEADS_AT_ONCE - 1) // HEADS_AT_ONCE
    KV_GROUPS: tl.constexpr = (KV_HEADS + HEADS_AT_ONCE - 1) // HEADS_AT_ONCE
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    row = qkv + token * row_strides[0]
    if ROTARY_DIM > 0:
        cos += token * row_strides[1]
        sin += token * row_strides[2]
    dim = tl.arange(0, BLOCK)
    if group < QUERY_GROUPS:
        head = group * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
        x = _rotated(row, head, cos, sin, query_factor, eps, HEADS, DIM, ROTARY_DIM, BLOCK)
        mask = (head < HEADS)[:, None] & (dim < DIM)[None, :]
        place = query + token * HEADS * DIM + head[:, None] * DIM + dim[None, :]
        tl.store(place, x.to(query.dtype.element_ty), mask)
    elif group < QUERY_GROUPS + KV_GROUPS:
        head = (group - QUERY_GROUPS) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
        x = _rotated(row + HEADS * DIM, head, cos, sin, key_factor, eps, KV_HEADS, DIM, ROTARY_DIM, BLOCK)
        x = x.to(qkv.dtype.element_ty).to(tl.float32)
        slot = tl.load(slots + token)
        store_heads(x, head, slot, keys, key_scales, keys_strides, scale_strides, KV_HEADS, DIM, BLOCK_SIZE)
    else:
        head = (group - QUERY_GROUPS - KV_GROUPS) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
        x = _rotated(row + (HEADS + KV_HEADS) * DIM, head, None, None, None, eps, KV_HEADS, DIM, 0, BLOCK)
        slot = tl.load(slots + token)
        store_heads(x, head, slot, values, value_scales, values_strides, scale_strides, KV_HEADS, DIM, BLOCK_SIZE)
