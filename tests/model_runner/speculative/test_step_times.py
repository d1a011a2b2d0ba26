"""Step times learned from simulated machines."""

import numpy as np
import pytest
from scipy.optimize import isotonic_regression

from model_runner.speculative.step_times import StepTimes, ascending

MEASURED = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])


def truth(rows, context=0):
    """A machine that reads for the first rows and computes for more."""
    return np.maximum(0.010, 0.004 + 0.0008 * np.asarray(rows, dtype=float)) + 2e-7 * context


def predict(times, rows, context=0):
    return times.predict(np.atleast_1d(np.asarray(rows, dtype=float)), np.atleast_1d(np.asarray(context, dtype=float)))


def test_at_first_it_says_what_was_measured():
    times = StepTimes(MEASURED, truth(MEASURED), 2e-7)
    rows = np.array([1, 3, 8, 20, 32, 100, 5000])
    assert predict(times, rows) == pytest.approx(truth(rows), rel=0.05)
    assert predict(times, 4, 10_000) == pytest.approx(truth(4, 10_000))


@pytest.mark.parametrize("factor", [0.1, 0.5, 2, 10])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_learns_from_a_wrong_start_under_noise(factor, noise):
    times, rng = StepTimes(MEASURED, np.full(6, 0.01 * factor), 2e-7 * factor), np.random.default_rng(1)
    for rows in rng.integers(1, 40, size=2000):
        times.observe(int(rows), 1000, float(truth(rows, 1000) * rng.lognormal(0, noise)))
    rows = np.arange(1, 40)
    assert predict(times, rows, 1000) == pytest.approx(truth(rows, 1000), rel=0.12 + noise)
    relative = predict(times, rows) / predict(times, 8)
    assert relative == pytest.approx(truth(rows) / truth(8), rel=0.12 + noise / 2)


@pytest.mark.parametrize("factor", [0.5, 2])
def test_a_slower_machine_is_slower_for_the_row_counts_that_do_not_occur(factor):
    times = StepTimes(MEASURED, truth(MEASURED), 0.0)
    for _ in range(300):
        times.observe(1, 0, float(truth(1) * factor))
    assert predict(times, 1) == pytest.approx(truth(1) * factor, rel=0.01)
    assert predict(times, 16) / predict(times, 1) == pytest.approx(truth(16) / truth(1), rel=0.2)


def test_it_follows_a_machine_that_drifts():
    times, rng = StepTimes(MEASURED, truth(MEASURED), 0.0), np.random.default_rng(2)
    for step in range(3000):
        speed = 1.5 + np.sin(step / 200)
        rows = int(rng.integers(1, 20))
        times.observe(rows, 0, float(truth(rows) * speed * rng.lognormal(0, 0.05)))
        if step > 100:
            assert predict(times, rows) == pytest.approx(truth(rows) * speed, rel=0.3)


def test_one_disturbed_step_changes_little():
    times = StepTimes(MEASURED, truth(MEASURED), 0.0)
    for _ in range(50):
        times.observe(1, 0, float(truth(1)))
    times.observe(1, 0, 5.0)
    assert predict(times, 1) < truth(1) * 1.35
    for _ in range(30):
        times.observe(1, 0, float(truth(1)))
    assert predict(times, MEASURED) == pytest.approx(truth(MEASURED), rel=0.05)


def test_a_count_that_was_measured_wrongly_at_first_does_not_stand_in_the_way_of_others():
    wrong = truth(MEASURED).copy()
    wrong[1] *= 3  # a disturbance while two rows were measured; after it, steps have one row or five
    times = StepTimes(MEASURED, wrong, 0.0)
    for _ in range(50):
        times.observe(1, 0, float(truth(1)))
        times.observe(5, 0, float(truth(5)))
    assert predict(times, 5) == pytest.approx(truth(5), rel=0.1)
    assert predict(times, 3) < truth(3) * 1.1


def test_more_rows_never_take_less_time():
    times, rng = StepTimes(MEASURED, truth(MEASURED), 0.0), np.random.default_rng(3)
    for rows in rng.integers(1, 2000, size=2000):
        times.observe(int(rows), 0, float(rng.lognormal(-4, 1)))
        assert (np.diff(predict(times, np.arange(1, 40))) >= -1e-12).all()


@pytest.mark.parametrize("rows", [1, 16384, 40_000])
def test_the_ends_of_the_curve_are_learned_too(rows):
    times = StepTimes(MEASURED, truth(MEASURED), 0.0)
    for _ in range(1000):
        times.observe(rows, 0, 0.5)
    assert predict(times, rows) == pytest.approx(0.5, rel=0.01)


def test_ascending_is_the_weighted_isotonic_regression():
    rng = np.random.default_rng(4)
    for _ in range(200):
        size = int(rng.integers(1, 12))
        values, weights = rng.normal(size=size), rng.uniform(0.1, 5, size=size)
        assert ascending(values, weights) == pytest.approx(isotonic_regression(values, weights=weights).x)
