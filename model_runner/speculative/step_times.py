"""How long a step takes, by its rows and their context, learned from the steps themselves."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_ROWS = np.array([*(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384), *(2.0 ** np.arange(9, 15))])
_SPEED_RATE, _SHAPE_RATE = 0.2, 0.03
"""How quickly the estimates follow of the machine's speed and of a row count that has been seen often."""
_MEASURED, _HANDED_ON, _LEAST_SEEN = 30.0, 8.0, 4.0
"""Steps that a measurement counts as at the start, for other sizes of batches, and after a long time without any."""
_MEMORY = 0.998
_OUTLIER, _MISSHAPEN = 1.5, 1.2
"""Bounds of one step's time relative to its expected time, for the speed and for the row count's part."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Size of a step, without drafts that compete."""

    rows: int
    context: int
    """The sum of the positions that rows attend to."""
    num_ready: int
    """Choices that get a token."""

    @property
    def context_of_row(self) -> float:
        """The mean of the rows' contexts."""
        return self.context / max(self.rows, 1)

    @property
    def only_decodes(self) -> bool:
        """Whether the step computes no prompt. A choice with a guide takes two rows."""
        return 0 < self.rows <= 2 * self.num_ready

    def plus(self, num_draft: int) -> "StepLoad":
        """The load with draft rows that are computed in any case."""
        return StepLoad(self.rows + num_draft, self.context + int(self.context_of_row * num_draft), self.num_ready)


class StepTimes:
    """Seconds of a step as speed * (a curve over rows + a slope * summed context of the rows).

    The curve is linear between its knots, which are times for some numbers of rows. What slows all steps down for a
    while changes only the speed, so knots that are not observed meanwhile stay comparable. More rows never take less
    time: knots out of order are averaged, weighted by how often they were seen lately.
    """

    def __init__(self, rows: FloatArray, seconds: FloatArray, per_context: float) -> None:
        """Start from measured seconds [n] of steps with these rows [n], ascending, and of each position of context."""
        slope = max((seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]), 0.0)
        self._knots = np.interp(_ROWS, rows, seconds) + slope * np.maximum(_ROWS - rows[-1], 0)
        self._seen = np.where(rows[-1] >= _ROWS, _MEASURED, 1.0)
        self._curve = ascending(self._knots, self._seen)
        self._per_context = per_context
        self._speed = 1.0

    def handed_on(self) -> "StepTimes":
        """A copy to start from for batches of another size, which outweigh it soon."""
        other = StepTimes(_ROWS, self._knots, self._per_context)
        other._seen, other._speed = np.minimum(self._seen, _HANDED_ON), self._speed
        return other

    def predict(self, rows: FloatArray, context: FloatArray) -> FloatArray:
        """Seconds of steps with these numbers of rows and summed contexts."""
        return self._speed * (np.interp(rows, _ROWS, self._curve) + self._per_context * context)

    def seconds(self, rows: int, context: int) -> float:
        """Seconds of one step."""
        return float(self._speed * (np.interp(rows, _ROWS, self._curve) + self._per_context * context))

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Learn from one step."""
        ratio = seconds / self.seconds(rows, context)
        self._speed *= min(max(ratio, 1 / _OUTLIER), _OUTLIER) ** _SPEED_RATE
        ratio = min(max(ratio, 1 / _MISSHAPEN), _MISSHAPEN)
        self._seen -= (1 - _MEMORY) * np.maximum(self._seen - _LEAST_SEEN, 0.0)
        place = float(np.interp(rows, _ROWS, np.arange(len(_ROWS))))
        for knot, weight in ((int(place), 1 - place % 1), (int(place) + 1, place % 1)):
            if weight:
                self._knots[knot] *= ratio ** (weight * max(_SHAPE_RATE, 1 / (1 + self._seen[knot])))
                self._seen[knot] += weight
        self._curve = ascending(self._knots, self._seen)


def ascending(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The ascending sequence that is nearest to the values (isotonic regression, by its max-min formula)."""
    if (np.diff(values) >= 0).all():
        return values.copy()
    weight, total = (np.concatenate([[0.0], numbers.cumsum()]) for numbers in (weights, weights * values))
    first, last = np.triu_indices(len(values))
    means = np.full((len(values), len(values)), np.inf)
    means[first, last] = (total[last + 1] - total[first]) / (weight[last + 1] - weight[first])
    least = np.minimum.accumulate(means[:, ::-1], 1)[:, ::-1]  # [first, i]: over all that end at i or later
    ascended: FloatArray = np.where(np.isfinite(means), least, -np.inf).max(0)
    return ascended
