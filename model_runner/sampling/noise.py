"""Counter-based noise: sampling without a generator's state.

Token x at output position t is drawn as argmax(log p(x) + g(x)), with Gumbel noise g that depends on (seed, choice,
stream, t, x) and on nothing else. Hence a pick does not depend on the batch, on how often a step is repeated, or on
whether other tokens got noise at all.
"""

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

_UNIFORM_BITS = 52
"""One less than a double's 53, so that (k + 0.5) * 2**-52 is exact and never rounds to 1."""
_ROUNDING = 1e-3
"""Above the float32 rounding of an upper bound: at most 1e-5, as all terms that matter are below 50."""
_CACHED_ELEMENTS = 1 << 17
"""On CPU so many elements are worked on at once: their int64 buffers stay in a core's cache."""


class Stream(IntEnum):
    """What the noise is for; different streams are independent."""

    TARGET = 0
    """The target's own tokens, and guesses at them: a guess with the same noise is right more often."""
    ACCEPT = 1
    """Whether rejection sampling accepts a draft; in place of a token id stands which of its siblings it is."""
    RESIDUAL = 2
    """The target's token where rejection sampling has accepted no draft. Drafts must not have been drawn with it."""
    XTC = 3
    """Whether the top choices are excluded at a position; the token id is 0."""


def noise_key(seed: int, choice: int, stream: Stream, position: int) -> int:
    """The 64-bit key of one row's noise. `position` counts output tokens from 0."""
    return _splitmix(noise_state(seed, choice, stream), position)


def noise_state(seed: int, choice: int, stream: Stream) -> int:
    """What the keys of a stream have in common; see `noise_keys`."""
    state = 0
    for word in (seed, choice, stream):
        state = _splitmix(state, word)
    return state


def noise_keys(states: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The keys of many rows at once."""
    return _splitmixes(states, positions)


def uniform(key: int, index: int) -> float:
    """A number from the open interval 0 to 1, with a double's resolution."""
    return ((_splitmix(key, index) >> (64 - _UNIFORM_BITS)) + 0.5) * 2.0**-_UNIFORM_BITS


def gumbel(key: int, token: int) -> float:
    """The standard Gumbel noise of one token, between -3.6 and 36.8."""
    return -math.log(-math.log(uniform(key, token)))


def gumbels(key: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """The same for many tokens, to within rounding: for guesses, not for what is drawn."""
    hashes = _splitmixes(np.uint64(key), tokens)
    uniforms = ((hashes >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) + 0.5) * 2.0**-_UNIFORM_BITS
    result: NDArray[np.float64] = -np.log(-np.log(uniforms))
    return result


def _splitmix(state: int, index: int) -> int:
    """Output number `index` (from 0) of SplitMix64 (Steele, Lea, Flood; OOPSLA 2014) started at `state`."""
    x = (state + (index + 1) * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _splitmixes(states: NDArray[np.uint64] | np.uint64, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The same for many states or indices."""
    x = states + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


class GumbelMax:
    """Draws one token for each row of logits.

    Every token gets its hash, but only a few get their noise: with v = 1 - u, -log(u) >= v, so log p - log(v) is an
    upper bound of the score log p - log(-log u). It is cheap in float32; only tokens whose bound reaches the score of
    some token can win. These are scored one by one in float64 on the host, where no vector width or device can round
    differently. kernels/cpu/gumbel_max.h draws the same tokens; kernels/triton/pick.py does so but for
    the last bit of its logarithms.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._steps = torch.arange(1, vocab_size + 1, device=device) * _signed(_GOLDEN)  # [vocab]

    def __call__(self, logits: Tensor, keys: Sequence[int], tokens: Tensor | None = None) -> list[int]:
        """The picked token id of each row; the lowest among equals.

        `logits` is [rows, width] float32 with at least one finite entry in each row and none above; `tokens` are the
        token ids of its columns, [rows, width], or None for the whole vocabulary in order.
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
    """(row, token id, relative logit) at the given places."""
    ids = columns if tokens is None else tokens[rows, columns]
    return list(zip(rows.tolist(), ids.tolist(), relative[rows, columns].tolist(), strict=True))


def _signed(word: int) -> int:
    """The int64 with the same bits as a 64-bit unsigned: torch multiplies and adds int64 modulo 2**64."""
    return word - (1 << 64) if word >> 63 else word


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift; torch's own copies the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _xorshift_(x: Tensor, bits: int) -> Tensor:
    return x.bitwise_xor_(_shift_right(x, bits))
