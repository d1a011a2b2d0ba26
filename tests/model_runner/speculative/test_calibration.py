"""Calibration: what is said against what happens."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.speculative.controller import Calibration


@pytest.mark.parametrize("truth", [0.02, 0.3, 0.5, 0.95])
@pytest.mark.parametrize("confidence", [0.0, 0.35, 0.8, 1.0])
def test_it_converges_to_the_truth_whatever_is_said(truth, confidence):
    calibration, rng = Calibration(), random.Random(1)
    estimates = []
    for step in range(3000):
        calibration.observe(confidence, accepted=rng.random() < truth)
        if step >= 500:
            estimates.append(calibration.probability(confidence))
    assert sum(estimates) / len(estimates) == pytest.approx(truth, abs=0.03)
    assert max(abs(estimate - truth) for estimate in estimates) < 0.2


def test_what_is_said_counts_until_it_is_measured():
    calibration = Calibration()
    for confidence in (0.0, 0.1, 0.55, 1.0):
        assert calibration.probability(confidence) == pytest.approx(confidence)


def test_one_confidence_says_nothing_about_another():
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(0.9, accepted=False)
    assert calibration.probability(0.9) < 0.1
    assert calibration.probability(0.5) == pytest.approx(0.5)


def test_it_follows_when_things_change():
    calibration = Calibration()
    for _ in range(2000):
        calibration.observe(0.7, accepted=False)
    assert calibration.probability(0.7) < 0.05
    steps = 0
    while calibration.probability(0.7) < 0.5:
        calibration.observe(0.7, accepted=True)
        steps += 1
    assert steps < 80


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=50), st.floats(0, 1))
def test_it_is_a_probability(observations, confidence):
    calibration = Calibration()
    for said, accepted in observations:
        calibration.observe(said, accepted=accepted)
    assert 0 <= calibration.probability(confidence) <= 1
