"""Draws in plain torch on any device: the definition that native draws and Triton's are tested against."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_runner.sampling.logprobs import take
from model_runner.sampling.noise import logs, uniform
from model_runner.sampling.rows import SamplingRows
from model_runner.sampling.truncations import compact

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIFORM_BITS = 52
_ROUNDING = 1e-3
"""Exceeds the float32 rounding error of an upper bound, which is at most 1e-5: all relevant terms are below 50."""
_CACHED_ELEMENTS = 1 << 17
"""Elements processed at once on CPU, so that their int64 buffers stay in a core's cache."""


def gumbel(key: int, token: int) -> float:
    """Standard Gumbel noise of one token, between -3.6 and 36.8."""
    return -log(-log(uniform(key, token)))


def log(x: float) -> float:
    """The logarithm of a positive, finite number."""
    return float(logs(np.array([x]))[0])


class GumbelMax:
    """Draws one token per row of logits.

    Every token is hashed, but only a few get their noise. With v = 1 - u, -log(u) >= v, so log p - log(v) is an upper
    bound of the score log p - log(-log u). The bound is cheap in float32, and only tokens whose bound reaches some
    token's score can win. These are scored one by one in float64 on the host, where no vector width or device changes
    the rounding. kernels/cpu/gumbel_max.h draws the same tokens; kernels/triton/pick.py does so except for the last bit
    of its logarithms.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._steps = torch.arange(1, vocab_size + 1, device=device) * _signed(_GOLDEN)  # [vocab]

    def __call__(self, logits: Tensor, keys: Sequence[int], tokens: Tensor | None = None) -> list[int]:
        """The sampled token id of each row. Ties go to the lowest id.

        `logits` is [rows, width] float32 with at least one finite entry per row and no NaN or +inf. `tokens` [rows,
        width] are the token ids of its columns, or None if the columns are the whole vocabulary in order.
        """
        num_rows, width = logits.shape
        block = max(1, _CACHED_ELEMENTS // width) if logits.device.type == "cpu" else num_rows
        picks: list[int] = []
        for start in range(0, num_rows, block):
            rows = slice(start, start + block)
            picks += self._pick(logits[rows], keys[rows], None if tokens is None else tokens[rows])
        return picks

    def _pick(self, logits: Tensor, keys: Sequence[int], tokens: Tensor | None) -> list[int]:
        relative = logits - logits.amax(-1, keepdim=True)  # [rows, width], 0 is the highest
        bounds = relative - self._log_remainders(keys, tokens)
        every_row = torch.arange(len(keys), device=logits.device)
        leaders = _entries(relative, tokens, every_row, bounds.argmax(-1))
        floors = [logit + gumbel(keys[row], token) - _ROUNDING for row, token, logit in leaders]
        reached = bounds >= torch.tensor(floors, dtype=torch.float32, device=logits.device).unsqueeze(1)
        best = [(-math.inf, 0)] * len(keys)
        for row, token, logit in _entries(relative, tokens, *reached.nonzero(as_tuple=True)):
            best[row] = max(best[row], (logit + gumbel(keys[row], token), -token))
        return [-token for _, token in best]

    def _log_remainders(self, keys: Sequence[int], tokens: Tensor | None) -> Tensor:
        """log(1 - u) for the uniform u of each token, [rows, width] float32."""
        steps = self._steps if tokens is None else self._steps[tokens]
        x = steps + torch.tensor([[_signed(key)] for key in keys], device=steps.device)  # [rows, width]
        _xorshift_(x, 30).mul_(_signed(_MIX_1))
        _xorshift_(x, 27).mul_(_signed(_MIX_2))
        _xorshift_(x, 31).bitwise_not_()
        remainder = _shift_right(x, 64 - _UNIFORM_BITS).to(torch.float32).add_(0.5)
        return remainder.log_().sub_(_UNIFORM_BITS * math.log(2))


def _entries(relative: Tensor, tokens: Tensor | None, rows: Tensor, columns: Tensor) -> list[tuple[int, int, float]]:
    """(row, token id, relative logit) at the given positions."""
    ids = columns if tokens is None else tokens[rows, columns]
    return list(zip(rows.tolist(), ids.tolist(), relative[rows, columns].tolist(), strict=True))


def _signed(word: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit word. torch multiplies and adds int64 modulo 2**64."""
    return word - (1 << 64) if word >> 63 else word


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own shift copies the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _xorshift_(x: Tensor, bits: int) -> Tensor:
    return x.bitwise_xor_(_shift_right(x, bits))


class TorchDraw:
    """Draws with torch on any device."""

    divides = False

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._noise = GumbelMax(vocab_size, device)

    def __call__(self, scores: Tensor, rows: SamplingRows) -> dict[int, int]:
        tokens: dict[int, int] = {}
        if rows.whole:
            keys = [rows.key(row) for row in rows.whole]
            tokens.update(zip(rows.whole, self._noise(take(scores, rows.whole), keys), strict=True))
        if rows.truncated:
            keys = [rows.key(row) for row in rows.truncated]
            left = take(scores, rows.truncated)
            columns, real = compact(left > -math.inf)
            left = left.gather(1, columns).masked_fill(~real, -math.inf)
            tokens.update(zip(rows.truncated, self._noise(left, keys, columns), strict=True))
        return tokens
