"""What a request has said so far, kept so that a step's bans and penalties need no pass over the history.

Plain Python; every table grows by one token at a time.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence


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
