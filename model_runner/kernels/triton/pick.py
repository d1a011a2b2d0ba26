"""Chooses the token of every row of logits: the highest, or a draw as sampling/noise.py defines it.

Three launches keep many multiprocessors busy even with one row: each chunk's highest logit; for rows that draw, each
chunk's best score, which needs the row's highest logit; the best of all chunks. Every result is a maximum with the
lowest token id among equals, so neither the order of work nor other rows affect it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 2048
"""Logits per program: 63 programs for one row of Llama 3's vocabulary, 75 for Qwen 3's. An H100 has 132 SMs."""

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-52)
_ALL_BITS = tl.constexpr((1 << 52) - 1)  # the bits that noise is made from
_ROUNDING = tl.constexpr(1e-3)  # above the float32 rounding of a bound, at most 1e-5 where it matters
_LAST = tl.constexpr(0xFFFFFFFF)
_LEAST = tl.constexpr(-(1 << 63))
_NOT_A_NUMBER = tl.constexpr(0x7FFFFFFF)  # as int32 above every number's bits; also a NaN's bits
_NO_TOKEN = tl.constexpr(-1)
_HALF = tl.constexpr(0x3FE0000000000000)  # the bits of 0.5
_ROOT_OF_HALF = tl.constexpr(math.sqrt(0.5))
_LN2_HIGH = tl.constexpr(0.693147180369123816490)
_LN2_LOW = tl.constexpr(1.90821492927058770002e-10)


def pick(logits: Tensor, keys: Tensor, temperatures: Tensor, out: Tensor | None = None) -> Tensor:
    """The token id of each row, [rows] int64; -1 where a row has NaN or +inf, or only -inf.

    Args:
        logits: [rows, vocab] float32, contiguous within a row.
        keys: [rows] int64, the bits of the rows' noise keys; ignored at temperature 0.
        temperatures: [rows] float64. 0 takes the highest logit. Otherwise a token is drawn from the softmax of the
            logits divided by the temperature, with the noise of sampling/noise.py.
        out: receives the result, if given.
    """
    num_rows, size = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("the logits of a row must stand side by side")
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if out is None else out
    if num_rows == 0:
        return out
    num_chunks = triton.cdiv(size, _CHUNK)
    leaders = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    scores = torch.empty(num_rows, num_chunks, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    chunks, width = (num_rows, num_chunks), triton.next_power_of_2(num_chunks)
    _find_leaders[chunks](logits, logits.stride(0), size, leaders, CHUNK=_CHUNK, num_warps=4)
    _draw_from_chunks[chunks](
        logits, logits.stride(0), size, keys, temperatures, leaders, scores, tokens,
        CHUNK=_CHUNK, CHUNKS=width, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _merge[(num_rows,)](temperatures, leaders, scores, tokens, num_chunks, out, CHUNKS=width, num_warps=1)
    return out


@triton.jit
def _find_leaders(logits, stride, size, leaders, CHUNK: tl.constexpr):
    """Write each chunk's highest logit with the lowest id that has it, packed so that the largest number wins.

    logits [rows, size]; leaders [rows, chunks]. NaN counts as the highest, and -0 equals 0.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    logit = tl.load(logits + row * stride + token, mask=token < size, other=-float("inf"))
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ _NOT_A_NUMBER, bits)  # ascends as the logits do
    order = tl.where(tl.abs(logit) <= float("inf"), order, _NOT_A_NUMBER)
    packed = (order.to(tl.int64) << 32) | (token.to(tl.int64) ^ _LAST)
    tl.store(leaders + row * tl.num_programs(1) + chunk, tl.max(packed, 0))


@triton.jit
def _leader(leaders, row, num_chunks, CHUNKS: tl.constexpr):
    """The row's highest logit, and the lowest id that has it."""
    chunk = tl.arange(0, CHUNKS)
    packed = tl.max(tl.load(leaders + row * num_chunks + chunk, mask=chunk < num_chunks, other=_LEAST), 0)
    order = (packed >> 32).to(tl.int32)
    bits = tl.where(order < 0, order ^ _NOT_A_NUMBER, order)
    return bits.to(tl.float32, bitcast=True), (packed & _LAST) ^ _LAST


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")  # false for NaN


@triton.jit
def _hash(key, token):
    """SplitMix64's output number `token` from the state `key`, both uint64."""
    x = key + (token + 1) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _gumbel(word):
    """The Gumbel noise of a hash, float64."""
    uniform = ((word >> 12).to(tl.float64) + 0.5) * _UNIT
    return -_log(-_log(uniform))


@triton.jit
def _log(x):
    """The logarithm of positive, finite float64, with the bits of sampling/noise.py if nothing is fused."""
    bits = x.to(tl.int64, bitcast=True)
    m = ((bits & _ALL_BITS) | _HALF).to(tl.float64, bitcast=True)  # from 1/2 to 1
    n = ((bits >> 52) - 1022).to(tl.float64)
    is_low = m < tl.full((), _ROOT_OF_HALF, tl.float64)
    m, n = tl.where(is_low, 2 * m, m), tl.where(is_low, n - 1, n)
    f = m - 1
    s = f / (2 + f)
    z = s * s
    half = 0.5 * f * f
    p = tl.full((), 2.0 / 21, tl.float64)
    for i in tl.static_range(1, 10):
        p = p * z + tl.full((), 2.0 / (21 - 2 * i), tl.float64)
    low = tl.full((), _LN2_LOW, tl.float64)
    return n * tl.full((), _LN2_HIGH, tl.float64) - ((half - (s * (half + p * z) + n * low)) - f)


@triton.jit
def _gumbel_bound(word):
    """An upper bound of `_gumbel` in float32, up to rounding: -log(u) >= 1 - u."""
    return -tl.log((((word >> 12) ^ _ALL_BITS).to(tl.float32) + 0.5) * _UNIT)


@triton.jit
def _draw_from_chunks(
    logits, stride, size, keys, temperatures, leaders, scores, tokens, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Write each chunk's best score and the lowest token that has it; -inf where no token can win.

    logits [rows, size]; keys, temperatures [rows]; leaders, scores, tokens [rows, chunks]. The score of the row's
    highest logit is a lower bound of the maximum: no noise is computed in a chunk where no token's upper bound reaches
    it.
    """
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        highest, leader = _leader(leaders, row, num_chunks, CHUNKS)
        best, best_token = tl.full((), -float("inf"), tl.float64), 0
        if _is_finite(highest):
            key = tl.load(keys + row).to(tl.uint64, bitcast=True)
            token = chunk * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
            logit = tl.load(logits + row * stride + token, mask=token < size, other=-float("inf"))
            relative = ((logit.to(tl.float64) - highest.to(tl.float64)) / temperature).to(tl.float32)
            word = _hash(key, token.to(tl.uint64))
            floor = _gumbel(_hash(key, leader.to(tl.uint64))).to(tl.float32) - _ROUNDING
            if tl.max(relative + _gumbel_bound(word), 0) >= floor:
                score = relative.to(tl.float64) + _gumbel(word)
                best = tl.max(score, 0)
                best_token = tl.min(tl.where(score == best, token, size), 0)
        tl.store(scores + row * num_chunks + chunk, best)
        tl.store(tokens + row * num_chunks + chunk, best_token)


@triton.jit
def _merge(temperatures, leaders, scores, tokens, num_chunks, out, CHUNKS: tl.constexpr):
    """Write the token of a row: temperatures, out [rows]; leaders, scores, tokens [rows, chunks]."""
    row = tl.program_id(0).to(tl.int64)
    highest, token = _leader(leaders, row, num_chunks, CHUNKS)
    if tl.load(temperatures + row) > 0:
        chunk = tl.arange(0, CHUNKS)
        place = row * num_chunks + chunk
        score = tl.load(scores + place, mask=chunk < num_chunks, other=-float("inf"))
        of_chunk = tl.load(tokens + place, mask=chunk < num_chunks, other=_NOT_A_NUMBER)
        token = tl.min(tl.where(score == tl.max(score, 0), of_chunk, _NOT_A_NUMBER), 0).to(tl.int64)
    tl.store(out + row, tl.where(_is_finite(highest), token, _NO_TOKEN))
