"""Token histories of requests, kept so that bans and penalties take little work per step.

A choice may begin with a long prompt, and all choices wait while its tables are built. So each table is built in
vectorised passes, then grows by one token at a time. Forks share what no longer changes and copy the rest, or take the
table as it was before the first token was added.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from model_runner.contract import Breaker
from model_runner.sampling.end_matches import EndMatches, Int32Array


class Table(Protocol):
    """Incremental information about a history."""

    def add(self, token: int) -> None:
        """Record a generated token."""
        ...

    def fork(self, *, from_start: bool) -> Self:
        """A copy that continues independently, from now or from construction."""
        ...


class SeenTokens:
    """The distinct tokens of a history."""

    def __init__(self, history: Iterable[int]) -> None:
        self._first = frozenset(history)
        self._first_tokens = array("q", self._first)
        self._later: set[int] = set()
        self._later_tokens = array("q")

    @property
    def tokens(self) -> "array[int]":
        """The distinct token ids."""
        return self._first_tokens + self._later_tokens

    def add(self, token: int) -> None:
        """Append a token to the history."""
        if token not in self._first and token not in self._later:
            self._later.add(token)
            self._later_tokens.append(token)

    def fork(self, *, from_start: bool) -> Self:
        fork = copy(self)
        fork._later = set() if from_start else self._later.copy()
        fork._later_tokens = array("q") if from_start else self._later_tokens[:]
        return fork


class TokenCounts:
    """The distinct tokens of the output and their counts."""

    def __init__(self, output: Iterable[int]) -> None:
        counts = Counter(output)
        self.tokens = array("q", counts)
        """Distinct token ids in order of first appearance."""
        self.counts = array("q", counts.values())
        """For each of `tokens`, how often it was generated."""
        self._index = {token: index for index, token in enumerate(counts)}

    def add(self, token: int) -> None:
        """Count a generated token."""
        index = self._index.setdefault(token, len(self.tokens))
        if index == len(self.tokens):
            self.tokens.append(token)
            self.counts.append(0)
        self.counts[index] += 1

    def fork(self, *, from_start: bool) -> Self:
        """A copy that continues independently. `from_start` requires that it was built from no tokens."""
        fork = copy(self)
        fork.tokens = array("q") if from_start else self.tokens[:]
        fork.counts = array("q") if from_start else self.counts[:]
        fork._index = {} if from_start else self._index.copy()
        return fork


class RepeatedNgrams:
    """The n-grams that the next token could repeat."""

    def __init__(self, history: Sequence[int], size: int) -> None:
        self._matches = EndMatches(history)
        self._least = size - 1

    def add(self, token: int) -> None:
        """Append a token to the history. Takes one vectorised pass over it."""
        self._matches.add(token)

    def fork(self, *, from_start: bool) -> Self:
        fork = copy(self)
        fork._matches = self._matches.fork(from_start=from_start)
        return fork

    def blocked(self) -> list[int]:
        """The tokens that would complete such an n-gram."""
        blocked: list[int] = np.unique(self._matches.tokens[self._matches.lengths >= self._least]).tolist()
        return blocked


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
    """Breakers with a common end, as a node of the trie."""

    first: set[int] = field(default_factory=set)
    """Tokens that begin a breaker when this node's tokens follow."""
    longer: dict[int, "_Ending"] = field(default_factory=dict)
    """Child nodes with one more token in front, by that token."""


class SequenceBreakers:
    """DRY's sequence breakers, as a trie of their tails that is read from the end.

    A lookup at a position takes at most one step more than the longest tail has tokens, whatever the number of breakers
    and of tokens they begin with.
    """

    def __init__(self, breakers: Iterable[Breaker]) -> None:
        self._root = _Ending()
        for breaker in breakers:
            ending = self._root
            for token in reversed(breaker.rest):
                ending = ending.longer.setdefault(token, _Ending())
            ending.first.update(breaker.first)
        self.single = self._root.first
        """Tokens that are breakers on their own."""

    def since_last(self, tokens: Int32Array, most: int) -> int:
        """Number of tokens after the last breaker, at most `most`."""
        lasts = np.array([*self._root.first, *self._root.longer], dtype=np.int32)
        begin = len(tokens) - most
        places = np.flatnonzero(np.isin(tokens[begin:], lasts))[::-1].tolist()
        return next((most - 1 - place for place in places if self.end_at(tokens, begin + place)), most)

    def end_at(self, tokens: Sequence[int] | Int32Array, place: int) -> bool:
        """Whether a breaker ends at this position."""
        ending: _Ending | None = self._root
        while ending is not None and place >= 0:
            token = int(tokens[place])
            if token in ending.first:
                return True
            ending = ending.longer.get(token)
            place -= 1
        return False


class Repetitions:
    """Earlier occurrences of the history's end and their lengths, for the DRY penalty."""

    def __init__(self, history: Sequence[int], last_n: int, breakers: Iterable[Breaker]) -> None:
        """`last_n` and `breakers` as in contract.Dry."""
        self._last_n = last_n
        self._breakers = SequenceBreakers(breakers)
        self._matches = EndMatches(history)
        longest = int(self._matches.lengths.max(initial=0))
        self._first_unbroken = self._unbroken = self._breakers.since_last(self._matches.tokens, longest)
        """Number of tokens after the last breaker; may be lower, but not lower than the longest repetition."""

    def add(self, token: int) -> None:
        """Append a token to the history. Takes one vectorised pass over it."""
        self._matches.add(token)
        tokens = self._matches.tokens
        self._unbroken = 0 if self._breakers.end_at(tokens, len(tokens) - 1) else self._unbroken + 1

    def fork(self, *, from_start: bool) -> Self:
        fork = copy(self)
        fork._matches = self._matches.fork(from_start=from_start)
        fork._unbroken = self._first_unbroken if from_start else self._unbroken
        return fork

    def prolonged(self, least: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens that would extend a repetition of at least `least` tokens (a positive number), and its maximum
        length.
        """
        history = self._matches.tokens
        places = np.flatnonzero(self._matches.lengths >= least)
        window = len(history) if self._last_n == -1 else min(self._last_n, len(history))
        within = places - (len(history) - window)
        lengths = np.minimum(np.minimum(self._matches.lengths[places], within), self._unbroken)
        tokens, index = np.unique(history[places].astype(np.int64), return_inverse=True)
        longest = np.zeros(len(tokens), dtype=np.int64)
        np.maximum.at(longest, index, lengths)
        is_penalised = np.array([token not in self._breakers.single for token in tokens.tolist()], dtype=np.bool_)
        kept = is_penalised & (longest >= least)
        return tokens[kept], longest[kept]
