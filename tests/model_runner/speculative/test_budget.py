"""The budget against trying every number of drafts, and its probes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner.speculative.budget import Budget, StepLoad
from model_runner.speculative.step_times import StepTimes

ROWS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])


def make_budget(seconds, per_context=0.0) -> Budget:
    budget = Budget()
    budget.times = StepTimes(ROWS, np.asarray(seconds, dtype=float), per_context)
    return budget


def linear(fixed, per_row):
    return fixed + per_row * ROWS


def best_count(seconds_of, num_ready, survival) -> tuple[int, float]:
    """The number of drafts with the highest rate, and this rate; the lowest number of equals."""
    rates = [(num_ready + sum(survival[:count])) / seconds_of(count) for count in range(len(survival) + 1)]
    return rates.index(max(rates)), max(rates)


@given(
    st.lists(st.floats(0, 1), max_size=40),
    st.integers(1, 32),
    st.floats(0.0001, 0.1),
    st.floats(0, 0.01),
    st.integers(0, 4000),
    st.floats(0, 1e-5),
)
@settings(max_examples=300)
def test_the_choice_is_the_analytic_optimum(survival, num_ready, fixed, per_row, context, per_context):
    survival = sorted(survival, reverse=True)
    budget = make_budget(linear(fixed, per_row), per_context)
    load = StepLoad(num_ready, num_ready * context, num_ready)

    def seconds_of(count):
        return fixed + per_row * (num_ready + count) + per_context * context * (num_ready + count)

    count = budget.choose(load, np.array(survival))
    _, best = best_count(seconds_of, num_ready, survival)
    rate = (num_ready + sum(survival[:count])) / seconds_of(count)
    assert rate == pytest.approx(best, rel=1e-3)  # contexts are whole numbers


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.lists(st.floats(0, 0.02), min_size=6, max_size=6))
@settings(max_examples=300)
def test_on_a_curve_of_any_shape(survival, rises):
    survival, seconds = sorted(survival, reverse=True), 0.001 + np.cumsum(rises)
    count = make_budget(seconds).choose(StepLoad(2, 0, 2), np.array(survival))
    expected, _ = best_count(lambda drafts: np.interp(2 + drafts, ROWS, seconds), 2, survival)
    assert count == expected


def test_rows_that_cost_nothing_are_all_taken():
    assert make_budget(np.full(6, 0.01)).choose(StepLoad(1, 0, 1), np.full(20, 0.01)) == 20


def test_a_prompt_in_the_step_makes_drafts_cheaper():
    """In a step that takes long anyway, a draft adds little to what others wait for."""
    budget = make_budget(linear(0.01, 0.002))
    assert budget.choose(StepLoad(4, 0, 4), np.full(8, 0.3)) == 0
    assert make_budget(linear(0.1, 0.002)).choose(StepLoad(4, 0, 4), np.full(8, 0.3)) == 8


def refuse(budget: Budget, num_steps: int, num_accepted: int = 0) -> list[int]:
    """Steps in which drafts should not pay; returns those that verified some all the same."""
    load, probes = StepLoad(8, 0, 8), []
    for step in range(num_steps):
        count = budget.choose(load, np.full(10, 0.01))
        if count:
            probes.append(step)
            assert count == 4
        seconds = 0.01 + 0.002 * (8 + count)
        budget.observe_step(load, count, min(num_accepted, count), seconds)
    return probes


def test_probes_are_rare_and_get_rarer():
    probes = refuse(make_budget(linear(0.01, 0.002)), 3000)
    assert 5 < len(probes) < 20
    assert probes[-1] - probes[-2] == 256


def test_probes_that_surprise_are_soon_repeated():
    budget = make_budget(linear(0.01, 0.002))
    refuse(budget, 3000)
    assert len(refuse(budget, 600, num_accepted=4)) > 20
    assert len(refuse(budget, 1000)) < 12


def test_what_was_expected_is_no_surprise():
    budget, load = make_budget(linear(0.01, 0.01)), StepLoad(1, 0, 1)
    counts = []
    for _ in range(1000):
        counts.append(budget.choose(load, np.full(4, 0.45)))
        budget.observe_step(load, counts[-1], 2, 0.02 + 0.01 * counts[-1])
    assert sum(count > 0 for count in counts) < 10


LOAD = StepLoad(4, 0, 4)


def teach(budget: Budget, method: str, survival: list[float], seconds: float) -> None:
    """The method drafts for four choices."""
    budget.observe_drafting(method, seconds)
    budget.observe_offers(method, [survival[0:2], survival[2:4], survival[4:6], survival[6:8]])


def wanted(budget: Budget, method: str, survival: list[float], seconds: float, num_steps: int) -> int:
    """In how many steps a method is to draft that always offers the same."""
    count = 0
    for _ in range(num_steps):
        if budget.wants(method, LOAD, 4):
            count += 1
            teach(budget, method, survival, seconds)
        budget.observe_step(LOAD, 0, 0, 0.018)
    return count


def test_an_unknown_method_is_tried():
    assert make_budget(linear(0.01, 0.002)).wants("new", LOAD, 4)


def test_a_method_drafts_while_it_brings_more_than_it_takes():
    budget = make_budget(linear(0.01, 0.002))
    assert wanted(budget, "good", [0.9] * 8, 0.002, 100) == 100  # 11.2 tokens in 36 ms against 4 in 18
    assert wanted(budget, "slow", [0.9] * 8, 0.05, 1000) < 10  # in 84 ms
    assert wanted(budget, "poor", [0.1], 0.002, 1000) < 10
    assert budget.expected_gain("good") == pytest.approx(1.8)
    assert budget.expected_gain("other") is None


def test_a_method_that_takes_no_time_may_always_look():
    budget = make_budget(linear(0.01, 0.002))
    assert wanted(budget, "quick", [], 0.0001, 100) == 100


def test_a_method_that_is_tried_is_judged_by_what_it_offers_now():
    budget = make_budget(linear(0.01, 0.002))
    teach(budget, "slow", [0.01] * 8, 0.002)
    while not budget.wants("slow", LOAD, 4):
        budget.observe_step(LOAD, 0, 0, 0.018)
    budget.observe_drafting("slow", 0.001)
    budget.observe_offers("slow", [[0.9, 0.9]] * 4)
    assert budget.expected_gain("slow") == pytest.approx(1.8)
    assert budget.wants("slow", LOAD, 4)


def test_what_a_tried_method_offers_is_verified_or_nothing_could_be_learned():
    budget = make_budget(linear(0.01, 0.002))
    teach(budget, "slow", [0.01] * 8, 0.002)
    assert budget.choose(LOAD, np.full(10, 0.01)) == 0
    while not budget.wants("slow", LOAD, 4):
        budget.observe_step(LOAD, 0, 0, 0.018)
    assert budget.choose(LOAD, np.full(10, 0.01)) == 4


def test_a_method_is_judged_by_the_load_at_hand():
    """The same offers pay in a small batch and not in a large one."""
    budget = make_budget(np.maximum(0.01, 0.004 + 0.001 * ROWS))
    for _ in range(50):
        budget.observe_drafting("guess", 0.002)
        budget.observe_offers("guess", [[0.7, 0.5, 0.3]] * 32)
    assert sum(budget.wants("guess", StepLoad(32, 0, 32), 32) for _ in range(10)) == 0
    assert budget.wants("guess", StepLoad(1, 0, 1), 1)


def test_drafts_that_are_computed_anyway_leave_the_context_of_the_others():
    load = StepLoad(4, 4000, 4).plus(2)
    assert load == StepLoad(6, 6000, 4)
    assert load.context_of_row == 1000
