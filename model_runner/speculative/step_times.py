"""How long a step takes, by its rows and their context, learned from the steps themselves."""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes apart from drafts that compete."""

    rows: int
    context: int
    """Positions that all rows together attend to."""
    num_ready: int
    """Choices that get a token."""

    @property
    def context_of_row(self) -> float:
        """Mean over the rows."""
        return self.context / max(self.rows, 1)

    @property
    def only_decodes(self) -> bool:
        """Whether there is no prompt in it. A choice that has a guide takes two rows."""
        return 0 < self.rows <= 2 * self.num_ready

    def plus(self, num_draft: int) -> "StepLoad":
        """With draft rows that are computed in any case."""
        return StepLoad(self.rows + num_draft, self.context + int(self.context_of_row * num_draft), self.num_ready)


FloatArray = npt.NDArray[np.float64]

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
_SPEED_RATE = 0.2
"""How quickly the estimate of the machine's speed follows, and ..."""
_SHAPE_RATE = 0.03
"""... that of a row count beside the others, once it has been seen often."""
_MEASURED = 30.0
"""Steps that a first measurement counts as, ..."""
_HANDED_ON = 8.0
"""... at most where it was made with other numbers of choices, ..."""
_LEAST_SEEN = 4.0
"""... and what was seen, after many steps in which it was not."""
_MEMORY = 0.998
"""What is left of the rest after another step."""
_OUTLIER = 1.5
"""A step that took so many times longer than expected, or less, counts as this, as it was disturbed; ..."""
_MISSHAPEN = 1.2
"""... and as this where its number of rows is compared with others, as it may be the machine that changes."""


class StepTimes:
    """Seconds of a step as speed * (a curve over rows + a slope * summed context of the rows).

    The curve has knots, between which it is straight. What slows all steps down for a while moves the speed alone, so
    that the counts of rows that do not occur then are not left behind. More rows never take less time: where knots say
    so, they are averaged, each by how much was seen of it lately.
    """

    def __init__(self, rows: FloatArray, seconds: FloatArray, per_context: float) -> None:
        """Start from measured times of steps with these (ascending) numbers of rows, without context.

        Args:
            rows: [n] at least two.
            seconds: [n] of each.
            per_context: seconds for each position that a row attends to.
        """
        slope = max((seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]), 0.0)
        beyond = seconds[-1] + slope * np.maximum(np.array(_ROWS) - rows[-1], 0)
        is_measured = rows[-1] >= np.array(_ROWS)
        self._knots: list[float] = np.where(is_measured, np.interp(_ROWS, rows, seconds), beyond).tolist()
        self._seen: list[float] = np.where(is_measured, _MEASURED, 1.0).tolist()
        self._curve = ascending(self._knots, self._seen)
        self._per_context = per_context
        self._speed = 1.0

    def handed_on(self) -> "StepTimes":
        """The same as a first guess for steps of another kind, which soon know better."""
        other = StepTimes(np.array([1.0, 2.0]), np.array([1.0, 1.0]), self._per_context)
        other._knots, other._curve, other._speed = list(self._knots), list(self._curve), self._speed
        other._seen = [min(seen, _HANDED_ON) for seen in self._seen]
        return other

    def predict(self, rows: FloatArray, context: FloatArray) -> FloatArray:
        """Seconds of steps with these numbers of rows and summed contexts."""
        return self._speed * (np.interp(rows, _ROWS, self._curve) + self._per_context * context)

    def seconds(self, rows: int, context: int) -> float:
        """The same of one step."""
        return self._speed * self.undisturbed(rows, context)

    def undisturbed(self, rows: int, context: int) -> float:
        """Without what slows the machine down, or speeds it up, at the moment."""
        upper, share = _place(rows)
        lower = self._curve[max(upper - 1, 0)]
        return lower + share * (self._curve[upper] - lower) + self._per_context * context

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Take in what a step took."""
        ratio = seconds / self.seconds(rows, context)
        self._speed *= min(max(ratio, 1 / _OUTLIER), _OUTLIER) ** _SPEED_RATE
        ratio = min(max(ratio, 1 / _MISSHAPEN), _MISSHAPEN)
        self._seen = [seen - (1 - _MEMORY) * max(seen - _LEAST_SEEN, 0.0) for seen in self._seen]
        upper, share = _place(rows)
        for knot, weight in ((max(upper - 1, 0), 1 - share), (upper, share)):
            if weight:
                self._knots[knot] *= ratio ** (weight * max(_SHAPE_RATE, 1 / (1 + self._seen[knot])))
                self._seen[knot] += weight
        self._curve = ascending(self._knots, self._seen)


def _place(rows: int) -> tuple[int, float]:
    """The first knot that is not before these rows, and how far they are on the way to it from the one before."""
    upper = min(bisect_left(_ROWS, rows), len(_ROWS) - 1)
    lower = max(upper - 1, 0)
    return upper, min((rows - _ROWS[lower]) / (_ROWS[upper] - _ROWS[lower]), 1.0) if upper > lower else 1.0


def ascending(values: list[float], weights: list[float]) -> list[float]:
    """The ascending sequence that is nearest to the values: neighbours out of order get their weighted mean.

    Pool adjacent violators (Ayer et al. 1955).
    """
    if (in_order := sorted(values)) == values:
        return in_order
    pools: list[tuple[float, float, int]] = []
    """Mean, weight, and how many values."""
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] >= mean:
            other_mean, other, others = pools.pop()
            mean = (other_mean * other + mean * total) / (other + total)
            total, count = total + other, count + others
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]
