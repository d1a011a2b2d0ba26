"""Counter-based noise: sampling without generator state.

Token x at output position t is drawn as argmax(log p(x) + g(x)), with Gumbel noise g that depends only on (seed,
choice, stream, t, x). So a sampled token does not depend on the batch, on how often a step is repeated, or on whether
other tokens got noise.
"""

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.sampling.logarithm import log, logs

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

_UNIFORM_BITS = 52
"""One less than a double's 53, so that (k + 0.5) * 2**-52 is exact and never rounds to 1."""
_ROUNDING = 1e-3
"""Exceeds the float32 rounding error of an upper bound, which is at most 1e-5: all relevant terms are below 50."""
_CACHED_ELEMENTS = 1 << 17
"""Elements processed at once on CPU, so that their int64 buffers stay in a core's cache."""


class Stream(IntEnum):
    """The purpose of the noise. Different streams are independent."""

    TARGET = 0
    """The target's own tokens, and guesses at them: a guess with the same noise is right more often."""
    ACCEPT = 1
    """Whether rejection sampling accepts a draft. The index among its siblings takes the place of the token id."""
    RESIDUAL = 2
    """The target's token where rejection sampling accepted no draft. Drafts must not be drawn with this stream."""
    XTC = 3
    """Whether XTC applies at a position. The token id is 0."""


def noise_key(seed: int, choice: int, stream: Stream, position: int) -> int:
    """The 64-bit key of one row's noise. `position` counts output tokens from 0."""
    return _splitmix(noise_state(seed, choice, stream), position)


def noise_state(seed: int, choice: int, stream: Stream) -> int:
    """The part of the key that all positions of a stream share. `noise_keys` turns it into keys."""
    state = 0
    for word in (seed, choice, stream):
        state = _splitmix(state, word)
    return state


def noise_keys(states: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Keys of many rows: `noise_state` of each row, and its output position."""
    return _splitmixes(states, positions)


def uniform(key: int, index: int) -> float:
    """A uniform number in the open interval (0, 1), with double resolution."""
    return ((_splitmix(key, index) >> (64 - _UNIFORM_BITS)) + 0.5) * 2.0**-_UNIFORM_BITS


def gumbel(key: int, token: int) -> float:
    """Standard Gumbel noise of one token, between -3.6 and 36.8."""
    return -log(-log(uniform(key, token)))


def gumbels(key: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """`gumbel` of many tokens."""
    hashes = _splitmixes(np.uint64(key), tokens)
    uniforms = ((hashes >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) + 0.5) * 2.0**-_UNIFORM_BITS
    return -logs(-logs(uniforms))


def _splitmix(state: int, index: int) -> int:
    """Output number `index` (from 0) of SplitMix64 (Steele, Lea, Flood; OOPSLA 2014) started at `state`."""
    x = (state + (index + 1) * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _splitmixes(states: NDArray[np.uint64] | np.uint64, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Like `_splitmix` for many states or indices."""
    x = states + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


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
