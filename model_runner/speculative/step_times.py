"""How long a step takes, by its rows and their context, learned from the steps themselves."""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_ROWS = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384],
    dtype=np.float64,
)
_SPEED_RATE = 0.2
"""How quickly the estimate of the machine's speed follows, and ..."""
_SHAPE_RATE = 0.03
"""... that of a row count beside the others, once it has been seen often."""
_MEASURED = 30.0
"""Steps that a first measurement counts as, ..."""
_LEAST_SEEN = 4.0
"""... and what was seen, after many steps in which it was not."""
_MEMORY = 0.998
"""What is left of the rest after another step."""
_OUTLIER = 3.0
"""A step that took so many times longer than expected was disturbed, and counts as this."""


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
        beyond = seconds[-1] + slope * np.maximum(_ROWS - rows[-1], 0)
        self._knots = np.where(rows[-1] >= _ROWS, np.interp(_ROWS, rows, seconds), beyond)
        self._seen = np.where(rows[-1] >= _ROWS, _MEASURED, 1.0)
        self._curve = _ascending(self._knots, self._seen)
        self._per_context = per_context
        self._speed = 1.0

    def predict(self, rows: FloatArray, context: FloatArray) -> FloatArray:
        """Seconds of steps with these numbers of rows and summed contexts."""
        return self._speed * (np.interp(rows, _ROWS, self._curve) + self._per_context * context)

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Take in what a step took."""
        expected = float(self.predict(np.array([rows]), np.array([context]))[0])
        ratio = min(seconds / expected, _OUTLIER)
        self._speed *= ratio**_SPEED_RATE
        self._seen -= (1 - _MEMORY) * np.maximum(self._seen - _LEAST_SEEN, 0)
        upper = min(int(np.searchsorted(_ROWS, rows)), len(_ROWS) - 1)
        lower = max(upper - 1, 0)
        share = min((rows - _ROWS[lower]) / (_ROWS[upper] - _ROWS[lower]), 1.0) if upper > lower else 1.0
        for knot, weight in ((lower, 1 - share), (upper, share)):
            self._knots[knot] *= ratio ** (weight * max(_SHAPE_RATE, 1 / (1 + self._seen[knot])))
            self._seen[knot] += weight
        self._curve = _ascending(self._knots, self._seen)


def _ascending(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The ascending sequence that is nearest to the values: neighbours out of order get their weighted mean.

    Pool adjacent violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, float, int]] = []
    """Mean, weight, and how many values."""
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pool = value, weight, 1
        while pools and pools[-1][0] >= pool[0]:
            mean, other, count = pools.pop()
            total = other + pool[1]
            pool = (mean * other + pool[0] * pool[1]) / total, total, count + pool[2]
        pools.append(pool)
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])
