"""The controller against trying every number of drafts, what all can bear, and what it spends on finding out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.speculative.controller import DraftOffer, SpeculationController
from model_runner.speculative.step_times import StepLoad, StepTimes

ROWS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
SURE = 1.2
"""A speedup by this factor is certain to pay, even before any measurement."""


def make_controller(seconds, per_context=0.0) -> SpeculationController:
    controller = SpeculationController()
    controller.times = StepTimes(ROWS, np.asarray(seconds, dtype=float), per_context)
    controller._to_try = -1e9  # nothing is verified but what pays
    return controller


def linear(fixed, per_row):
    return fixed + per_row * ROWS


def best_speed(seconds_of, survival, num_rows=1) -> float:
    """For one choice, the highest speed relative to that without drafts."""
    counts = range(len(survival) + 1)
    return max((1 + sum(survival[:count])) / seconds_of(num_rows * count) * seconds_of(0) for count in counts)


def test_a_method_that_hardly_ever_offers_anything_to_one_of_many() -> None:
    """A first node is rarer than what counts as never for one choice, and not for all of them together."""
    controller, load = SpeculationController(), StepLoad(64, 6400, 64)
    for _ in range(20):
        controller.observe_drafting("ngram", 0.0, [[]] * 64, 16)
    controller.observe_drafting("ngram", 0.0, [[0.9] * 16, *[[]] * 63], 16)
    controller.begin_cycle(load, all_bear=True)
    assert controller.num_wanted("ngram", load, 64, 16) in range(17)


# -- what is verified --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0, 1), max_size=40),
    st.floats(0.0001, 0.1),
    st.floats(0, 0.01),
    st.integers(0, 4000),
    st.floats(0, 1e-5),
    st.integers(1, 2),
)
def test_the_choice_is_the_analytic_optimum_where_that_pays_for_sure(
    survival, fixed, per_row, context, per_context, num_rows
):
    survival = sorted(survival, reverse=True)
    load = StepLoad(num_rows, num_rows * context, 1)

    def seconds_of(drafts):
        return fixed + (per_row + per_context * context) * (num_rows + drafts)

    (count,) = make_controller(linear(fixed, per_row), per_context).choose(load, [DraftOffer(survival, num_rows)])
    best = best_speed(seconds_of, survival, num_rows)
    if count:
        speed = (1 + sum(survival[:count])) / seconds_of(num_rows * count) * seconds_of(0)
        assert speed == pytest.approx(best, rel=1e-3)  # contexts are whole numbers
        assert best > 1
    else:
        assert best < SURE


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.lists(st.floats(0, 0.02), min_size=6, max_size=6))
def test_on_a_curve_of_any_shape(survival, rises):
    survival, seconds = sorted(survival, reverse=True), 0.001 + np.cumsum(rises)
    (count,) = make_controller(seconds).choose(StepLoad(2, 0, 1), [DraftOffer(survival)])
    plain = np.interp(2, ROWS, seconds)
    best = best_speed(lambda drafts: np.interp(2 + drafts, ROWS, seconds), survival)
    speed = (1 + sum(survival[:count])) / np.interp(2 + count, ROWS, seconds) * plain
    assert speed == pytest.approx(best) or (count == 0 and best < SURE)


def test_rows_that_cost_nothing_are_all_taken():
    assert make_controller(np.full(6, 0.01)).choose(StepLoad(1, 0, 1), [DraftOffer([0.01] * 20)]) == [20]


def test_a_prompt_in_the_step_makes_drafts_cheaper():
    """In a step that takes long anyway, a draft adds little to what others wait for."""
    offers = [DraftOffer([0.6, 0.5])] * 4
    assert make_controller(linear(0.01, 0.008)).choose(StepLoad(4, 0, 4), offers) == [0] * 4
    assert make_controller(linear(0.1, 0.002)).choose(StepLoad(4, 0, 4), offers) == [2] * 4


def test_a_node_of_a_choice_with_a_guide_takes_two_rows():
    """So it has to bring twice as much."""
    load, seconds = StepLoad(2, 0, 1), linear(0.002, 0.004)
    assert make_controller(seconds).choose(load, [DraftOffer([0.6])]) == [1]
    assert make_controller(seconds).choose(load, [DraftOffer([0.6], rows_of_node=2)]) == [0]
    assert make_controller(seconds).choose(load, [DraftOffer([0.99], rows_of_node=2)]) == [1]


def test_what_is_computed_anyway_leaves_the_context_of_the_others():
    load = StepLoad(4, 4000, 4).plus(2)
    assert load == StepLoad(6, 6000, 4)
    assert load.context_of_row == 1000


# -- what others can bear ----------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=6), min_size=2, max_size=8),
    st.lists(st.floats(-1, 4), min_size=8, max_size=8),
    st.floats(0.0, 0.01),
)
def test_nobody_waits_longer_than_it_can_bear(offers, patience, per_row):
    offers = [DraftOffer(sorted(one, reverse=True), 1, left) for one, left in zip(offers, patience, strict=False)]
    num, seconds = len(offers), linear(0.01, per_row)
    counts = make_controller(seconds).choose(StepLoad(num, 0, num), offers)
    assert all(count <= len(offer.survival) for count, offer in zip(counts, offers, strict=True))
    time = np.interp(num + sum(counts), ROWS, seconds) / np.interp(num, ROWS, seconds)
    for count, offer in zip(counts, offers, strict=True):
        if sum(counts):
            assert time <= 1.08 * (1 + sum(offer.survival[:count])) + offer.patience + 1e-6


def test_a_long_draft_of_one_choice_is_cut_for_the_others():
    seconds = linear(0.012, 0.001)  # one more row of eight takes a twentieth longer
    sure = [0.99] * 16
    (alone,) = make_controller(seconds).choose(StepLoad(1, 0, 1), [DraftOffer(sure)])
    assert alone == 16
    assert make_controller(seconds).choose(StepLoad(8, 0, 8), [DraftOffer(sure), *[DraftOffer()] * 7])[0] == 1
    patient = [DraftOffer(sure), *[DraftOffer(patience=4.0)] * 7]
    assert make_controller(seconds).choose(StepLoad(8, 0, 8), patient)[0] == 16
    assert sum(make_controller(seconds).choose(StepLoad(8, 0, 8), [DraftOffer(sure)] * 8)) > 16


def test_patience_is_what_was_gained_and_not_lost():
    assert SpeculationController.patience(0.0, 1, 1.0) == pytest.approx(0.08)
    assert SpeculationController.patience(0.0, 1, 1.3) == pytest.approx(-0.22)
    assert SpeculationController.patience(0.0, 3, 1.3) == pytest.approx(1.94)
    assert SpeculationController.patience(0.0, 16, 1.3) == 4.0
    assert SpeculationController.patience(0.0, 1, 9.0) == -1.0


# -- when methods draft ------------------------------------------------------------------------------------------------

LOAD = StepLoad(4, 0, 4)


def cycle(
    controller: SpeculationController, method: str, offer: list[float], draft_s: float, truth: float = 1.0
) -> int:
    """One step of four choices that are offered the same; returns how many nodes each was to be offered at most."""
    controller.begin_cycle(LOAD, all_bear=True)
    wanted = controller.num_wanted(method, LOAD, 4, 16)
    chosen = [0] * 4
    if wanted:
        controller.observe_drafting(method, draft_s, [offer[:wanted]] * 4, wanted)
        chosen = controller.choose(LOAD, [DraftOffer(offer[:wanted])] * 4)
    gained = truth * sum(sum(offer[:count]) for count in chosen)
    cycle_s = draft_s * (wanted > 0) + 0.01 + 0.002 * (4 + sum(chosen))
    controller.observe_step(LOAD, sum(chosen), round(gained), cycle_s)
    return wanted


def share(
    controller: SpeculationController, offer: list[float], draft_s: float, truth: float = 1.0, num_steps: int = 1000
) -> float:
    return sum(cycle(controller, "method", offer, draft_s, truth) > 0 for _ in range(num_steps)) / num_steps


@pytest.mark.parametrize(
    ("offer", "draft_s", "low", "high"),
    [
        ([0.9] * 8, 0.002, 0.9, 0.999),  # except for steps that are held out
        ([0.9] * 8, 0.5, 0.0, 0.01),
        ([0.1], 0.002, 0.01, 0.08),
        ([], 0.0001, 0.1, 0.5),  # to look takes next to no time
        ([], 0.002, 0.01, 0.05),
    ],
)
def test_a_method_drafts_while_it_brings_more_than_it_takes(offer, draft_s, low, high):
    assert low <= share(make_controller(linear(0.01, 0.002)), offer, draft_s) <= high


def test_only_so_many_nodes_are_wanted_as_pay_and_one_more():
    controller = make_controller(linear(0.01, 0.002))
    offer = [0.9, 0.8, 0.7, 0.05, 0.04, 0.03]
    assert cycle(controller, "method", offer, 0.001) == 16
    wanted = [cycle(controller, "method", offer, 0.001) for _ in range(100)]
    assert set(wanted) <= {0, 4}
    assert controller.expected_gain("method") == pytest.approx(sum(offer), rel=0.01)  # further ones are not forgotten
    assert controller.expected_gain("other") is None


def test_one_outlier_of_a_drafting_time_changes_nothing():
    controller = make_controller(linear(0.01, 0.002))
    share(controller, [0.9, 0.8], 0.001, num_steps=50)
    cycle(controller, "method", [0.9, 0.8], 1.0)
    assert share(controller, [0.9, 0.8], 0.001, num_steps=50) > 0.85


def test_what_never_comes_true_is_soon_left_alone():
    """However sure the method is: the steps that are held out show it."""
    assert share(make_controller(linear(0.01, 0.002)), [0.8, 0.6], 0.001, truth=0.0) < 0.15
    assert share(make_controller(linear(0.01, 0.002)), [0.8, 0.6], 0.001, truth=1.0) > 0.8


def test_a_method_is_judged_by_the_load_at_hand():
    """The same offers pay in a small batch and not in a large one."""
    controller = make_controller(np.maximum(0.01, 0.004 + 0.001 * ROWS))
    for _ in range(50):
        controller.observe_drafting("guess", 0.002, [[0.7, 0.5, 0.3]] * 32, 16)
    controller.begin_cycle(StepLoad(32, 0, 32), all_bear=True)
    controller.stats["guess"].asked_at = 0
    assert not controller.num_wanted("guess", StepLoad(32, 0, 32), 32, 16)
    controller.begin_cycle(StepLoad(1, 0, 1), all_bear=True, num_rested=15)  # which is as long as it may rest
    assert controller.num_wanted("guess", StepLoad(1, 0, 1), 1, 16)


def test_nobody_drafts_while_a_choice_has_waited_too_long():
    controller = make_controller(linear(0.01, 0.002))
    controller.begin_cycle(LOAD, all_bear=False)
    assert not controller.num_wanted("new", LOAD, 4, 16)


# -- what is tried -----------------------------------------------------------------------------------------------------


def test_what_does_not_pay_is_tried_with_a_small_share_of_the_time():
    controller = make_controller(linear(0.01, 0.002))
    controller._to_try = 0.0
    lost, tries = 0.0, 0
    for _ in range(3000):
        controller.begin_cycle(LOAD, all_bear=True)
        count = sum(controller.choose(LOAD, [DraftOffer([0.01] * 10, patience=1.0)] * 4))
        controller.observe_step(LOAD, count, 0, 0.018 + 0.002 * count)
        assert count <= 4
        tries, lost = tries + (count > 0), lost + 0.002 * count
    assert 10 < tries < 100
    assert lost < 0.005 * 3000 * 0.018
    before = tries
    for _ in range(300):
        controller.begin_cycle(LOAD, all_bear=True)
        count = sum(controller.choose(LOAD, [DraftOffer([0.01] * 10, patience=1.0)] * 4))
        controller.observe_step(LOAD, count, count, None)  # which surprises
        tries += count > 0
    assert tries - before > 30
