"""Writes keys and values into the paged cache."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
"""Minimum number of values per program, if a token has that many."""
_PER_WARP = 256
"""Values per warp, 8 for each thread: one 16-byte access in half precision."""


class CacheLayer(NamedTuple):
    """A layer's tensors of a KVCache, with any strides."""

    keys: Tensor  # [blocks, kv_heads, key_dim, block_size]
    values: Tensor  # [blocks, kv_heads, block_size, value_dim]
    key_scales: Tensor | None = None  # [blocks, kv_heads, block_size] float32; for int8 and float8_e4m3fn
    value_scales: Tensor | None = None

    @property
    def strides(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Strides of keys and of values (block, head, place, dimension), and of scales (block, head, place)."""
        block, head, dim, place = self.keys.stride()
        scales = (0, 0, 0) if self.key_scales is None else self.key_scales.stride()
        return (block, head, place, dim), self.values.stride(), scales


def heads_at_once(num_heads: int, dim: int) -> int:
    """Heads of one token per program: a power of two, at most the number of heads rounded up to a power of two."""
    of_tile, of_heads = max(1, _TILE // triton.next_power_of_2(dim)), triton.next_power_of_2(num_heads)
    return int(min(of_tile, of_heads))


def num_warps(at_once: int, dim: int) -> int:
    """Warps of a program that processes `at_once` heads."""
    return max(1, at_once * int(triton.next_power_of_2(dim)) // _PER_WARP)


def write_kv(key: Tensor, value: Tensor, slots: Tensor, cache: CacheLayer) -> None:
    """Store the keys and values of tokens, as KVCache.write does.

    With scales, each head's key or value vector is stored as multiples of its own scale. The scale is the largest
    magnitude / 127 (int8, rounded to nearest, ties to even) or / 448 (float8_e4m3fn). If that magnitude is below 1e-30,
    the scale is 0; if a value is not finite, it is NaN. In both cases zeros are stored.

    Args:
        key: [T, kv_heads, key_dim]; the values of a head are contiguous.
        value: [T, kv_heads, value_dim]; the values of a head are contiguous.
        slots: [T] int64, block * block_size + place of each token; -1 to skip a token.
        cache: where to store them.
    """
    num_tokens, kv_heads, key_dim = key.shape
    value_dim = value.shape[2]
    if not num_tokens:
        return
    at_once = heads_at_once(kv_heads, max(key_dim, value_dim))
    _write_kernel[num_tokens, triton.cdiv(kv_heads, at_once)](
        key,
        value,
        slots,
        *cache,
        key.stride(),
        value.stride(),
        *cache.strides,
        KV_HEADS=kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=cache.values.shape[2],
        HEADS_AT_ONCE=at_once,
        KEY_BLOCK=triton.next_power_of_2(key_dim),
        VALUE_BLOCK=triton.next_power_of_2(value_dim),
        num_warps=num_warps(at_once, max(key_dim, value_dim)),
        enable_fp_fusion=False,
    )


@triton.jit
def _rounded(x):
    """Round float32 values up to 2^22 to the nearest integer, ties to even: at 2^23 the unit in the last place is 1."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2^23


@triton.jit
def store_heads(
    x,
    head,
    slot,
    cache,
    scales,
    strides,
    scale_strides,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Store one token's vectors x [n, BLOCK_DIM] float32 of these heads [n] in its slot, as write_kv describes.

    Compile without fused multiply-add: the product must be rounded.
    """
    is_head = (head < HEADS) & (slot >= 0)
    dim = tl.arange(0, x.shape[1])
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    if scales is not None:
        LARGEST: tl.constexpr = 127.0 if cache.dtype.element_ty == tl.int8 else 448.0
        magnitude = tl.abs(x)
        highest = tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), 1)  # [n]; NaN is inf
        is_usable = (highest >= 1e-30) & (highest < float("inf"))
        scale = tl.where(is_usable, tl.div_rn(highest, LARGEST), tl.where(highest < 1e-30, 0.0, float("nan")))
        factor = tl.where(is_usable, tl.div_rn(LARGEST, highest), 0.0)
        x = tl.where(is_usable[:, None], x * factor[:, None], 0.0)
        if cache.dtype.element_ty == tl.int8:
            x = _rounded(x)
        tl.store(scales + block * scale_strides[0] + head * scale_strides[1] + place * scale_strides[2], scale, is_head)
    vector = cache + block * strides[0] + head * strides[1] + place * strides[2]  # [n]
    mask = is_head[:, None] & (dim < DIM)[None, :]
    tl.store(vector[:, None] + dim[None, :] * strides[3], x.to(cache.dtype.element_ty), mask)


@triton.jit
def _loaded(row, head, head_stride, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Vectors [n, BLOCK] float32 of these heads [n] of a row."""
    dim = tl.arange(0, BLOCK)
    mask = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    return tl.load(row + head[:, None] * head_stride + dim[None, :], mask, 0.0).to(tl.float32)


@triton.jit
def _write_kernel(
    key,  # [T, KV_HEADS, KEY_DIM]
    value,  # [T, KV_HEADS, VALUE_DIM]
    slots,  # [T]
    keys,
    values,
    key_scales,
    value_scales,
    key_strides,
    value_strides,
    keys_strides,
    values_strides,
    scale_strides,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Store keys and values of some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    slot = tl.load(slots + token)
    x = _loaded(key + token * key_strides[0], head, key_strides[1], KV_HEADS, KEY_DIM, KEY_BLOCK)
    store_heads(x, head, slot, keys, key_scales, keys_strides, scale_strides, KV_HEADS, KEY_DIM, BLOCK_SIZE)
    x = _loaded(value + token * value_strides[0], head, value_strides[1], KV_HEADS, VALUE_DIM, VALUE_BLOCK)
    store_heads(x, head, slot, values, value_scales, values_strides, scale_strides, KV_HEADS, VALUE_DIM, BLOCK_SIZE)
