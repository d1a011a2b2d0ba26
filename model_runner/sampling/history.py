"""What a request has said so far, kept so that a step's bans and penalties need no pass over the history.

Every table grows by one token at a time.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model_runner.contract import Breaker


class TokenCounts:
    """The distinct tokens seen so far, and how often each was generated."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self.tokens = array("q")
        """Distinct token ids, in the order in which they first appeared."""
        self.counts = array("q")
        """For each of `tokens`, how often it was generated; 0 if it stands in the prompt only."""
        self._index: dict[int, int] = {}
        for token in prompt:
            self._find(token)

    def add(self, token: int) -> None:
        """Count a generated token."""
        self.counts[self._find(token)] += 1

    def _find(self, token: int) -> int:
        index = self._index.setdefault(token, len(self.tokens))
        if index == len(self.tokens):
            self.tokens.append(token)
            self.counts.append(0)
        return index


class NgramTable:
    """Which tokens followed every (n-1)-gram of the history."""

    def __init__(self, size: int) -> None:
        self._tail: deque[int] = deque(maxlen=size - 1)
        self._followers: dict[tuple[int, ...], set[int]] = {}

    def add(self, token: int) -> None:
        """Append a token to the history."""
        if len(self._tail) == self._tail.maxlen:
            self._followers.setdefault(tuple(self._tail), set()).add(token)
        self._tail.append(token)

    def blocked(self) -> Iterable[int]:
        """The tokens that would complete an n-gram for the second time."""
        return self._followers.get(tuple(self._tail), ())


class BadWords:
    """Token sequences that must not be completed."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._single = [word[0] for word in words if len(word) == 1]
        self._longer: dict[int, list[tuple[list[int], int]]] = {}
        for *head, last in words:
            if head:
                self._longer.setdefault(head[-1], []).append((head, last))

    def blocked(self, history: list[int]) -> list[int]:
        """The tokens that would complete a word after this history."""
        matches = self._longer.get(history[-1], ()) if history else ()
        return self._single + [last for head, last in matches if history[-len(head) :] == head]


@dataclass(slots=True)
class _Ending:
    """The breakers whose last tokens are the same."""

    first: set[int] = field(default_factory=set)
    """The tokens that begin a breaker if these follow."""
    longer: dict[int, "_Ending"] = field(default_factory=dict)
    """The endings of one token more, by that token."""


class SequenceBreakers:
    """DRY's breakers, in a trie of their rests that is read from the end.

    To ask whether one ends at a place takes a step for each token that agrees with a rest, and so at most one more than
    the longest rest has tokens, however many breakers there are and however many tokens they may begin with.
    """

    def __init__(self, breakers: Iterable[Breaker]) -> None:
        self._root = _Ending()
        for breaker in breakers:
            ending = self._root
            for token in reversed(breaker.rest):
                ending = ending.longer.setdefault(token, _Ending())
            ending.first.update(breaker.first)
        self.single = self._root.first
        """The tokens that are a breaker by themselves."""

    def end_at(self, tokens: Sequence[int] | NDArray[np.int64], place: int) -> bool:
        """Whether the last token of a breaker is the one at this place."""
        ending: _Ending | None = self._root
        while ending is not None and place >= 0:
            token = int(tokens[place])
            if token in ending.first:
                return True
            ending = ending.longer.get(token)
            place -= 1
        return False


class Repetitions:
    """Where in the history its end has occurred before, and how much of it: what the DRY penalty is made of."""

    def __init__(self, history: Sequence[int], last_n: int, breakers: Iterable[Breaker]) -> None:
        """`last_n` and `breakers` as in contract.Dry."""
        self._last_n = last_n
        self._breakers = SequenceBreakers(breakers)
        self._num = len(history)
        self._tokens = np.array([*history, *[0] * (len(history) + 16)], dtype=np.int64)  # with room for more
        self._lengths = np.zeros_like(self._tokens)
        """For each place in the history, how many tokens before it are the same as at the history's end."""
        self._lengths[: self._num] = _common_suffixes(history)
        places = range(self._num - 1, -1, -1)
        ends = (num for num, place in enumerate(places) if self._breakers.end_at(history, place))
        self._unbroken = next(ends, self._num)
        """How many tokens there are after the last breaker."""

    def add(self, token: int) -> None:
        """Append a token to the history. Takes one vectorised pass over it."""
        if self._num == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
        longer = self._lengths[: self._num] + 1
        self._lengths[1 : self._num + 1] = np.where(self._tokens[: self._num] == token, longer, 0)
        self._tokens[self._num] = token
        self._unbroken = 0 if self._breakers.end_at(self._tokens, self._num) else self._unbroken + 1
        self._num += 1

    def prolonged(self, least: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens that would prolong a repetition of at least so many tokens; and for each, of how many at most.

        `least` is positive.
        """
        places = np.flatnonzero(self._lengths[: self._num] >= least)
        window = self._num if self._last_n == -1 else min(self._last_n, self._num)
        within = places - (self._num - window)
        lengths = np.minimum(np.minimum(self._lengths[places], within), self._unbroken)
        tokens, index = np.unique(self._tokens[places], return_inverse=True)
        longest = np.zeros(len(tokens), dtype=np.int64)
        np.maximum.at(longest, index, lengths)
        is_penalised = np.array([token not in self._breakers.single for token in tokens.tolist()], dtype=np.bool_)
        kept = is_penalised & (longest >= least)
        return tokens[kept], longest[kept]


def _common_suffixes(tokens: Sequence[int]) -> list[int]:
    """For each place, how many tokens before it are the same as at the end. Linear: the Z-algorithm, backwards."""
    num = len(tokens)
    backwards = list(reversed(tokens))
    common = [0] * num  # of `backwards` and itself from each place on
    left = right = 0  # the stretch that reaches furthest and is known to equal the beginning
    for place in range(1, num):
        known = min(right - place, common[place - left]) if place < right else 0
        while place + known < num and backwards[known] == backwards[place + known]:
            known += 1
        common[place] = known
        if place + known > right:
            left, right = place, place + known
    return [common[num - place] if place else 0 for place in range(num)]
