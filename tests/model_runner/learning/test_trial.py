"""Comparisons against their formulas, and against heads of which one is better, or none."""

import math

import numpy as np
import pytest

from model_runner.learning.learner import CLEAR, HALF_LIFE, LIKELY, GainEstimate, PieceScore, Rate

SOURCE = np.random.default_rng(0)


def compared(gains: list[float], rows: int = 60) -> GainEstimate:
    """Two versions on pieces of `rows` rows, on each of which one has so many accepted tokens more a row."""
    estimate = GainEstimate()
    for gain in gains:
        estimate.add(PieceScore(rows, round(rows * (0.8 + gain))), PieceScore(rows, round(rows * 0.8)))
    return estimate


def test_mean_and_error_are_those_of_the_formulas() -> None:
    rows = SOURCE.integers(1, 400, 50)
    one, other = SOURCE.integers(0, 900, 50), SOURCE.integers(0, 900, 50)
    estimate = GainEstimate()
    for n, a, b in zip(rows, one, other, strict=True):
        estimate.add(PieceScore(int(n), int(a)), PieceScore(int(n), int(b)))
    later = rows[::-1].cumsum()[::-1] - rows
    weight = 0.5 ** (later / HALF_LIFE)
    total = (weight * rows).sum()
    mean = (weight * (one - other)).sum() / total
    error = math.sqrt((weight**2 * (one - other - mean * rows) ** 2).sum()) / total
    assert estimate.mean == pytest.approx(mean)
    assert estimate.error == pytest.approx(error)


def test_rate_forgets() -> None:
    rate = Rate()
    assert rate.value is None
    for _ in range(200):
        rate.add(PieceScore(100, 90))
    assert rate.value == pytest.approx(1.9)
    for _ in range(HALF_LIFE // 100):
        rate.add(PieceScore(100, 50))
    assert rate.value == pytest.approx(1.7, abs=0.01)


def test_a_clear_difference_is_found_in_either_direction() -> None:
    gains = list(SOURCE.normal(0.1, 0.2, 100))
    better, worse = compared(gains), compared([-gain for gain in gains])
    for errors in (LIKELY, CLEAR):
        assert better.is_gain(1.8, errors)
        assert not better.is_loss(1.8, errors)
        assert worse.is_loss(1.8, errors)
        assert not worse.is_gain(1.8, errors)


def test_no_verdict_without_a_difference_or_without_enough_pieces() -> None:
    equal = [compared(list(SOURCE.normal(0.0, 0.2, 60))) for _ in range(200)]
    assert sum(one.is_gain(1.8, CLEAR) or one.is_loss(1.8, CLEAR) for one in equal) <= 4
    assert sum(one.is_gain(1.8, LIKELY) for one in equal) <= 16
    assert not compared([0.5] * 5).is_gain(1.8, LIKELY)
    assert compared([0.5] * 8).is_gain(1.8, CLEAR)
    assert not compared([0.01] * 3000, rows=100).is_gain(1.8, LIKELY)  # certain, but not worth anything
