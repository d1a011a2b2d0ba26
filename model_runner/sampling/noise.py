"""Counter-based noise: sampling without generator state.

Token x at output position t is drawn as argmax(log p(x) + g(x)), with Gumbel noise g that depends only on (seed,
choice, stream, t, x). So a sampled token does not depend on the batch, on how often a step is repeated, or on whether
other tokens got noise.
"""

import math
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

_UNIFORM_BITS = 52
"""One less than a double's 53, so that (k + 0.5) * 2**-52 is exact and never rounds to 1."""

_LEAST = math.sqrt(0.5)
_LN2_HIGH = 0.693147180369123816490
_LN2_LOW = 1.90821492927058770002e-10


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


def uniform(key: int, index: int) -> float:
    """A uniform number in the open interval (0, 1), with double resolution."""
    return ((_splitmix(key, index) >> (64 - _UNIFORM_BITS)) + 0.5) * 2.0**-_UNIFORM_BITS


def gumbels(key: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of many tokens, -log(-log u) with a uniform number u for each: between -3.6 and 36.8."""
    hashes = noise_keys(np.uint64(key), tokens)
    uniforms = ((hashes >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) + 0.5) * 2.0**-_UNIFORM_BITS
    return -logs(-logs(uniforms))


def _splitmix(state: int, index: int) -> int:
    """Output number `index` (from 0) of SplitMix64 (Steele, Lea, Flood; OOPSLA 2014) started at `state`."""
    x = (state + (index + 1) * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def noise_keys(states: NDArray[np.uint64] | np.uint64, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`_splitmix` of many rows: the key of each from its `noise_state` and output position."""
    x = states + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def logs(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The natural logarithms of positive, finite numbers, with the same bits on every machine.

    kernels/cpu/double_math.h computes the same. Python's and numpy's use the C library's or vector units' own, whose
    last bit depends on the processor. These consist of additions, products and quotients, which IEEE 754 rounds alike
    everywhere. Errors are below one unit in the last place.
    """
    mantissas, exponents = np.frexp(x)
    is_low = mantissas < _LEAST
    return _log_of(mantissas * (1.0 + is_low), (exponents - is_low).astype(np.float64))


def _log_of(m: NDArray[np.float64], n: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithm of 2**n * m, with m between sqrt(1/2) and sqrt(2)."""
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    half = 0.5 * f * f
    p = z * (2.0 / 21) + 2.0 / 19
    p = p * z + 2.0 / 17
    p = p * z + 2.0 / 15
    p = p * z + 2.0 / 13
    p = p * z + 2.0 / 11
    p = p * z + 2.0 / 9
    p = p * z + 2.0 / 7
    p = p * z + 2.0 / 5
    p = p * z + 2.0 / 3
    return n * _LN2_HIGH - ((half - (s * (half + p * z) + n * _LN2_LOW)) - f)
