"""Where the end of a history has occurred before, and how much of it."""

from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

_SHORT = 64
"""Tokens that are compared at all places at once: more only agree where a text repeats itself."""
_ROOM = 16
"""Tokens at least for which there is room before the arrays grow."""


class EndMatches:
    """For each place of a history, how many tokens before it are the same as at the history's end.

    However long the history and however it repeats itself, to make it takes some vectorised passes over it, and to
    append a token takes one.
    """

    def __init__(self, history: Sequence[int]) -> None:
        tokens = np.array(history, dtype=np.int32)
        self._first_lengths = np.zeros_like(tokens)
        self._first_lengths[1:] = common_prefixes(tokens[::-1].copy())[:0:-1]
        self._take(tokens, self._first_lengths)

    def _take(self, tokens: Int32Array, lengths: Int32Array) -> None:
        """Have copies of these for history and lengths, with room for more."""
        self._num = len(tokens)
        self._tokens, self._lengths = np.zeros((2, 2 * self._num + _ROOM), dtype=np.int32)
        self._tokens[: self._num] = tokens
        self._lengths[: self._num] = lengths

    @property
    def tokens(self) -> Int32Array:
        """The history. Not to be changed."""
        return self._tokens[: self._num]

    @property
    def lengths(self) -> Int32Array:
        """For each place. Not to be changed."""
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
        """One that goes on by itself, from here or from how this one was made."""
        fork = copy(self)
        lengths = self._first_lengths if from_start else self.lengths
        fork._take(self._tokens[: len(lengths)], lengths)
        return fork


def common_prefixes(text: Int32Array) -> Int32Array:
    """For each place, how much of the text from there on is the same as its beginning; 0 for the first place.

    The Z-algorithm (Gusfield 1997, section 1.4) is linear, but goes from place to place. So it is left with those that
    vectorised passes do not settle. That are few: two that are near each other make the beginning periodic, and a
    period settles all but one of the places in each stretch that has it.
    """
    lengths, places = _short(text)
    if (period := _period(text[:_SHORT])) and len(places):
        lengths[places], is_settled = _periodic(text, places, period)
        places = places[~is_settled]
    left = right = 0  # the stretch that reaches furthest of those known to equal the beginning
    for place in places.tolist():
        known = min(int(lengths[place - left]), right - place) if place < right else 0
        if place + max(known, _SHORT) >= right:
            known = max(known, _SHORT)
            known += _agreement(text, known, place + known)
            left, right = place, place + known
        lengths[place] = known
    return lengths


def _short(text: Int32Array) -> tuple[Int32Array, NDArray[np.int64]]:
    """What `_SHORT` tokens tell: the lengths up to there, and the places, in order, where all of them agree."""
    lengths = np.zeros(len(text), dtype=np.int32)
    agrees = np.ones(max(len(text) - 1, 0), dtype=np.bool_)  # of the places from 1 on
    for shift in range(min(_SHORT, len(agrees))):
        agrees = agrees[: len(text) - 1 - shift] & (text[1 + shift :] == text[shift])
        if not agrees.any():
            break
        lengths[1 : 1 + len(agrees)] += agrees
    return lengths, np.flatnonzero(lengths == _SHORT)


def _period(beginning: Int32Array) -> int:
    """The shortest period of a text that stands there twice; 0 if there is none."""
    periods = range(1, len(beginning) // 2 + 1)
    return next((period for period in periods if (beginning[period:] == beginning[:-period]).all()), 0)


def _periodic(text: Int32Array, places: NDArray[np.int64], period: int) -> tuple[Int32Array, NDArray[np.bool_]]:
    """How long text and beginning go on with the same period from places where two periods agree.

    Where one leaves the period before the other does, they differ there, and the length is settled. Elsewhere they may
    agree on what comes next.
    """
    breaks = np.append(np.flatnonzero(text[period:] != text[:-period]), len(text) - period)
    extents = (breaks[np.searchsorted(breaks, places)] - places + period).astype(np.int32)
    extent = breaks[0] + period  # of the beginning
    return np.minimum(extents, extent), extents != extent


def _agreement(text: Int32Array, one: int, other: int) -> int:
    """How many tokens from two places on are the same; `other` is the later place."""
    start, size = other, _SHORT
    while other < len(text):
        later = text[other : other + size]
        differs = text[one : one + len(later)] != later
        first = int(differs.argmax())
        if differs[first]:
            return other - start + first
        one, other, size = one + len(later), other + len(later), 2 * size
    return len(text) - start
