"""Finds earlier occurrences of the end of a history, and the length of each match."""

from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

_SHORT = 64
"""Tokens compared at all positions at once. Longer matches occur only in repetitive text."""
_ROOM = 16
"""Minimum spare capacity, in tokens, before the arrays grow."""


class EndMatches:
    """For each position of a history, how many tokens before it equal the tokens at the history's end.

    Construction takes a few vectorised passes over the history and appending a token takes one, however repetitive it
    is.
    """

    def __init__(self, history: Sequence[int]) -> None:
        tokens = np.array(history, dtype=np.int32)
        self._first_lengths = np.zeros_like(tokens)
        self._first_lengths[1:] = common_prefixes(tokens[::-1].copy())[:0:-1]
        self._take(tokens, self._first_lengths)

    def _take(self, tokens: Int32Array, lengths: Int32Array) -> None:
        """Store copies of the history and its match lengths, with room to grow."""
        self._num = len(tokens)
        self._tokens, self._lengths = np.zeros((2, 2 * self._num + _ROOM), dtype=np.int32)
        self._tokens[: self._num] = tokens
        self._lengths[: self._num] = lengths

    @property
    def tokens(self) -> Int32Array:
        """The history. Do not modify."""
        return self._tokens[: self._num]

    @property
    def lengths(self) -> Int32Array:
        """Match length at each position. Do not modify."""
        return self._lengths[: self._num]

    def add(self, token: int) -> None:
        """Append a token to the history."""
        if self._num == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
        self._lengths[1 : self._num + 1] = (self.lengths + 1) * (self.tokens == token)
        self._tokens[self._num] = token
        self._num += 1

    def fork(self, *, from_start: bool) -> Self:
        """A copy that continues independently, from now or from construction."""
        fork = copy(self)
        lengths = self._first_lengths if from_start else self.lengths
        fork._take(self._tokens[: len(lengths)], lengths)
        return fork


def common_prefixes(text: Int32Array) -> Int32Array:
    """For each position, the length of the common prefix of `text` and its suffix from there; 0 at position 0.

    The Z-algorithm (Gusfield 1997, section 1.4) is linear but sequential, so it runs only where vectorised passes leave
    the length open. Few positions remain: two that are close together make the beginning periodic, and a period settles
    all but one of the positions in each periodic stretch.
    """
    lengths, places = _short(text)
    if (period := _period(text[:_SHORT])) and len(places):
        lengths[places], is_settled = _periodic(text, places, period)
        places = places[~is_settled]
    left = right = 0  # the stretch known to equal the beginning that reaches furthest
    for place in places.tolist():
        known = min(int(lengths[place - left]), right - place) if place < right else 0
        if place + max(known, _SHORT) >= right:
            known = max(known, _SHORT)
            known += _agreement(text, known, place + known)
            left, right = place, place + known
        lengths[place] = known
    return lengths


def _short(text: Int32Array) -> tuple[Int32Array, NDArray[np.int64]]:
    """Prefix lengths up to `_SHORT` tokens, and the sorted positions where all `_SHORT` tokens match."""
    lengths = np.zeros(len(text), dtype=np.int32)
    agrees = np.ones(max(len(text) - 1, 0), dtype=np.bool_)  # of the positions from 1 on
    for shift in range(min(_SHORT, len(agrees))):
        agrees = agrees[: len(text) - 1 - shift] & (text[1 + shift :] == text[shift])
        if not agrees.any():
            break
        lengths[1 : 1 + len(agrees)] += agrees
    return lengths, np.flatnonzero(lengths == _SHORT)


def _period(beginning: Int32Array) -> int:
    """The shortest period with which a text occurs at least twice, or 0 if there is none."""
    periods = range(1, len(beginning) // 2 + 1)
    return next((period for period in periods if (beginning[period:] == beginning[:-period]).all()), 0)


def _periodic(text: Int32Array, places: NDArray[np.int64], period: int) -> tuple[Int32Array, NDArray[np.bool_]]:
    """Common-prefix lengths at positions that share the beginning's period, and which of them are final.

    If one side leaves the period before the other, they differ there and the length is final. If both leave it at the
    same distance, they may still agree on the next token.
    """
    breaks = np.append(np.flatnonzero(text[period:] != text[:-period]), len(text) - period)
    extents = (breaks[np.searchsorted(breaks, places)] - places + period).astype(np.int32)
    extent = breaks[0] + period  # of the beginning
    return np.minimum(extents, extent), extents != extent


def _agreement(text: Int32Array, one: int, other: int) -> int:
    """The number of equal tokens from two positions on; `other` is the later one."""
    start, size = other, _SHORT
    while other < len(text):
        later = text[other : other + size]
        differs = text[one : one + len(later)] != later
        first = int(differs.argmax())
        if differs[first]:
            return other - start + first
        one, other, size = one + len(later), other + len(later), 2 * size
    return len(text) - start
