"""What is remembered of the traffic: the latest pieces, as many as fit into a number of bytes."""

import random
from collections.abc import Sequence

from model_runner.training.examples import Example

NEWEST = 8
"""One part of so many of the pieces is new; half of what is drawn comes from it."""


class Ring:
    """Pieces in the order in which they came; the oldest make room for new ones."""

    def __init__(self, capacity: int) -> None:
        """`capacity` in bytes of features and tokens."""
        self._capacity = capacity
        self._pieces: dict[int, Example] = {}  # by number; the numbers there are have no gap
        self._next = 0
        self._bytes = 0
        self._num_answer = 0

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def num_answer(self) -> int:
        """Tokens that can be learnt from."""
        return self._num_answer

    def add(self, piece: Example) -> None:
        """Remember a piece, unless there is nothing to learn from it or it is greater than everything that fits."""
        size = _bytes(piece)
        if size > self._capacity or piece.num_answer < 1:
            return
        self._pieces[self._next] = piece
        self._next += 1
        self._bytes += size
        self._num_answer += piece.num_answer
        while self._bytes > self._capacity:
            oldest = self._pieces.pop(self._next - len(self._pieces))
            self._bytes -= _bytes(oldest)
            self._num_answer -= oldest.num_answer

    def newest(self, rows: int) -> list[Example]:
        """The latest pieces that have `rows` tokens to learn from, or all; the latest last."""
        taken: list[Example] = []
        for number in reversed(self._pieces):
            if rows <= 0:
                break
            taken.append(self._pieces[number])
            rows -= taken[-1].num_answer
        return taken[::-1]

    def batch(self, rows: int, source: random.Random) -> Sequence[Example]:
        """Pieces with `rows` tokens to learn from, or with those of one piece more; the ring is not empty.

        Half of the draws are from the newest eighth, so that a change of subject is learnt quickly; half are from all,
        so that what came before is not forgotten at once.
        """
        taken: list[Example] = []
        count, first = len(self._pieces), self._next - len(self._pieces)
        while rows > 0:
            oldest = count - max(1, count // NEWEST) if source.random() < 0.5 else 0
            taken.append(self._pieces[first + source.randrange(oldest, count)])
            rows -= taken[-1].num_answer
        return taken


def _bytes(piece: Example) -> int:
    return piece.tokens.nbytes + sum(rows.nbytes for rows in piece.features.values())
