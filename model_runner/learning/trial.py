"""Which of two sets of heads is better, found out on traffic that neither was trained on.

Every piece that arrives is guessed by all versions in question before it is trained on: test, then train. That is
prequential evaluation (Dawid, "Statistical Theory: The Prequential Approach", JRSS A 147, 1984), which for streams
that change forgets what is old (Gama, Sebastião and Rodrigues, "On evaluating stream learning algorithms", Machine
Learning 90, 2013). It needs no held-out data, and measures the one thing that matters: what comes next.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runner.training.examples import Example
from model_runner.training.objective import Objective

HALF_LIFE = 4096
"""Rows after which what was seen counts half."""
LIKELY = 2.0
"""Standard errors from which on a gain may be tried: heads that are no better than those in use cost nothing. ..."""
CLEAR = 3.0
"""... From which on something may be given up for it. It is looked at again and again, so two would be too few."""
_LEAST = 0.01
"""Difference that is worth anything, as a part of the tokens per step."""
_PIECES = 8
"""Whose scatter is the least from which a standard error can be told."""


@dataclass(frozen=True, slots=True)
class Tally:
    """How a version did on one piece."""

    rows: int
    """Places from which as many tokens follow as the heads guess."""
    accepted: int
    """Tokens that a chain of first guesses got right at these places, in all."""


def judge(heads: Objective | None, pieces: Sequence[Example], depth: int) -> list[Tally]:
    """One tally for each piece; None are heads that guess nothing, which counts at the same places for `depth`."""
    if heads is None:
        return [Tally(max(0, one.num_answer - depth), 0) for one in pieces]
    ranks = heads.ranks(pieces)  # [R, depth]
    whole = (ranks >= 0).all(1)
    accepted = (ranks == 0).long().cumprod(1).sum(1) * whole
    sizes = [one.num_answer for one in pieces]
    parts = zip(torch.split(whole, sizes), torch.split(accepted, sizes), strict=True)
    return [Tally(int(places.sum()), int(tokens.sum())) for places, tokens in parts]


class Rate:
    """Tokens per step on what came in lately."""

    def __init__(self) -> None:
        self._rows = 0.0
        self._accepted = 0.0

    @property
    def value(self) -> float | None:
        """The target's own token included; None before there was anything."""
        return 1 + self._accepted / self._rows if self._rows else None

    def add(self, tally: Tally) -> None:
        """Of the next piece."""
        kept = 0.5 ** (tally.rows / HALF_LIFE)
        self._rows = self._rows * kept + tally.rows
        self._accepted = self._accepted * kept + tally.accepted


class Comparison:
    """How many more tokens per step one version gives than another, on the same pieces.

    The mean is a ratio of sums over pieces, and its standard error comes from the scatter of the pieces: rows of one
    piece are alike and do not count as independent. With the weights w that forgetting leaves to pieces of n rows and a
    difference of s, mean = sum(w s) / sum(w n) and error^2 = sum(w^2 (s - mean n)^2) / sum(w n)^2.
    """

    def __init__(self) -> None:
        self._pieces = 0
        self._sums = torch.zeros(2, dtype=torch.float64)  # w s, w n
        self._squares = torch.zeros(2, 2, dtype=torch.float64)  # w^2 of s s, s n, n s, n n

    def add(self, one: Tally, other: Tally) -> None:
        """Both on the next piece."""
        kept = 0.5 ** (one.rows / HALF_LIFE)
        seen = torch.tensor([one.accepted - other.accepted, one.rows], dtype=torch.float64)
        self._pieces += one.rows > 0
        self._sums = self._sums * kept + seen
        self._squares = self._squares * kept**2 + torch.outer(seen, seen)

    @property
    def mean(self) -> float:
        """Of one minus the other."""
        difference, rows = self._sums.tolist()
        return difference / rows if rows else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite before there are enough pieces."""
        if self._pieces < _PIECES:
            return math.inf
        weights: Tensor = torch.tensor([1.0, -self.mean], dtype=torch.float64)
        return math.sqrt(max(0.0, float(weights @ self._squares @ weights))) / float(self._sums[1])

    def is_gain(self, rate: float, errors: float) -> bool:
        """Whether the one is better by so many standard errors, and by what is worth it; `rate` is about theirs."""
        return self.mean > max(errors * self.error, _LEAST * rate)

    def is_loss(self, rate: float, errors: float) -> bool:
        """Whether it is worse by as much."""
        return -self.mean > max(errors * self.error, _LEAST * rate)
