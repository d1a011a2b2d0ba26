"""Whole servers with simulated time: auto against never drafting and against the best that could be known beforehand.

Time passes in steps by a measured curve, in drafting, and in Python for each choice and each draft; it is noisy, and
some steps are disturbed. Every claim is also made of a policy that should fail it.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from model_runner.speculative.controller import DraftOffer, SpeculationController
from model_runner.speculative.step_times import StepLoad, StepTimes
from tests.model_runner.speculative.world import Guesser, World, two_cores

ROWS = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
NOISE, OUTLIERS, DRAFT_ROW_S, CHOICE_S = 0.05, 0.005, 30e-6, 20e-6
PLENTY = 16
"""Nodes that a choice may have."""


class Fixed(SpeculationController):
    """So many drafts for every choice, whatever they cost."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def num_wanted(self, method: str, load: StepLoad, choices: int, most: int) -> int:
        return min(self._count, most)

    def choose(self, load: StepLoad, offers: list[DraftOffer]) -> list[int]:  # type: ignore[override]
        return [min(len(offer.survival), self._count) for offer in offers]


class Gullible(SpeculationController):
    """Takes drafting to be free and its model to be right: what it sees of time is the step alone."""

    def observe_drafting(self, method: str, seconds: float, drafts: Sequence[Sequence[float]], most: int) -> None:
        super().observe_drafting(method, 0.0, drafts, most)

    def observe_step(self, load: StepLoad, num_rows: int, num_accepted: int, cycle_s: float | None) -> float:
        return super().observe_step(load, num_rows, num_accepted, None)


class Reckless(SpeculationController):
    """Always gives the most tokens to all, no matter who waits."""

    def choose(self, load: StepLoad, offers: list[DraftOffer]) -> list[int]:  # type: ignore[override]
        return super().choose(load, [DraftOffer(offer.survival, offer.rows_of_node, np.inf) for offer in offers])

    def begin_cycle(self, load: StepLoad, *, all_bear: bool, num_rested: int = 0) -> None:
        super().begin_cycle(load, all_bear=True, num_rested=num_rested)


def make_world(
    make_controller: Callable[[], SpeculationController], num_choices: int, guesser: dict[str, Any], **more: Any
) -> World:
    controller = make_controller()
    controller.times = StepTimes(ROWS, np.array([two_cores(rows) for rows in ROWS]), 0.0)
    settings = {"noise": NOISE, "outliers": OUTLIERS, "draft_row_s": DRAFT_ROW_S, "choice_s": CHOICE_S} | more
    return World({"guess": Guesser(**guesser)}, ["guess"] * num_choices, two_cores, controller=controller, **settings)


@cache
def rate_without(num_choices: int, before: int, num_steps: int) -> float:
    """Tokens per second in `num_steps` steps after `before` others, with the same noise as those steps elsewhere."""
    return make_world(partial(Fixed, 0), num_choices, {"accuracy": 0.0}).run(before).rate(num_steps)


DRAFTERS: dict[str, dict[str, Any]] = {
    "never": {"accuracy": 0.0, "seconds": 2e-4, "per_choice_s": 2e-5},
    "rarely": {"accuracy": 0.1, "seconds": 2e-4, "per_choice_s": 2e-5},
    "slightly": {"accuracy": 0.35, "confidence": 0.5, "seconds": 2e-4, "per_choice_s": 2e-5},
    "mostly": {"accuracy": 0.7, "confidence": 0.7, "seconds": 3e-4, "per_choice_s": 4e-5},
    "hugely": {"accuracy": 0.95, "confidence": 0.9, "length": 16, "seconds": 1e-4, "per_choice_s": 2e-5},
    "modest": {"accuracy": 0.9, "confidence": 0.1, "length": 8, "seconds": 1e-4, "per_choice_s": 2e-5},
    "slow": {"accuracy": 0.6, "confidence": 0.6, "seconds": 4e-3, "per_choice_s": 5e-5},
}


def best_of_fixed(num_choices: int, drafter: dict[str, Any]) -> float:
    """The rate of the best number of drafts, known beforehand, with nobody's waiting looked at."""
    counts = [count for count in (1, 2, 3, 4, 8, 16) if count <= drafter.get("length", 4)]
    num_steps = 400 if num_choices < 32 else 100
    return max(make_world(partial(Fixed, count), num_choices, drafter).rate(num_steps) for count in counts)


@pytest.mark.parametrize(
    ("drafter", "num_choices"), [*product(DRAFTERS, [1, 32]), ("slightly", 8), ("hugely", 8), ("slow", 8)]
)
def test_auto_is_near_the_better_of_none_and_the_best(drafter, num_choices):
    world = make_world(SpeculationController, num_choices, DRAFTERS[drafter])
    first = world.run(200).tokens / world.clock[0]
    num_steps = 1000 if num_choices < 32 else 400
    later = world.rate(num_steps)
    without = rate_without(num_choices, 200, num_steps)
    best = max(without, best_of_fixed(num_choices, DRAFTERS[drafter]))
    assert first > 0.97 * rate_without(num_choices, 0, 200)  # it has to find out
    assert later > 0.98 * without
    assert later > 0.93 * best
    longest = world.clock[0] / min(world.tokens_of)
    assert longest < 1.1 * num_choices / without


def test_where_drafting_is_taken_to_be_free_that_is_lost():
    """The negative control."""
    assert make_world(Gullible, 8, DRAFTERS["slow"]).rate(500) < 0.95 * rate_without(8, 0, 500)
    assert make_world(Gullible, 32, DRAFTERS["slightly"]).rate(500) < 0.97 * rate_without(32, 0, 500)


# -- what changes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_choices", [1, 8])
def test_a_text_that_begins_to_repeat_itself_is_soon_noticed(num_choices):
    """After a long time in which nothing was found."""
    world = make_world(SpeculationController, num_choices, DRAFTERS["hugely"] | {"coverage": 0.0})
    assert world.rate(1000) > 0.98 * rate_without(num_choices, 0, 1000)
    world.guessers["guess"].coverage = 1.0
    best = best_of_fixed(num_choices, DRAFTERS["hugely"])
    world.run(48)
    assert world.rate(200) > 0.9 * best


@pytest.mark.parametrize("num_choices", [1, 8, 32])
def test_a_text_that_stops_repeating_itself_costs_little(num_choices):
    world = make_world(SpeculationController, num_choices, DRAFTERS["hugely"])
    world.run(500)
    world.guessers["guess"].accuracy = 0.02
    assert world.rate(200) > 0.8 * rate_without(num_choices, 500, 200)
    assert world.rate(500) > 0.98 * rate_without(num_choices, 700, 500)


def test_a_crowd_that_comes_and_goes():
    world = make_world(SpeculationController, 32, DRAFTERS["mostly"])
    methods, rates = list(world.methods), {}
    for num_choices in (32, 1, 32, 1):
        for slot in range(num_choices, len(world.methods)):
            world.speculator.end(slot)
        world.resize(methods[:num_choices])
        rates[num_choices] = world.run(50).rate(300)
    assert rates[32] > 0.98 * rate_without(32, 750, 300)
    assert rates[1] > 0.93 * best_of_fixed(1, DRAFTERS["mostly"])


# -- what the model of time cannot know --------------------------------------------------------------------------------


class Uncompared(SpeculationController):
    """Believes what it predicts, whatever comes of it."""

    def observe_step(self, load: StepLoad, num_rows: int, num_accepted: int, cycle_s: float | None) -> float:
        time = super().observe_step(load, num_rows, num_accepted, cycle_s)
        for stats in self.stats.values():
            stats._savings.clear()
        for size in self._sizes.values():
            size._tokens[:] = 1e9
        return time


def overrated(controller: Callable[[], SpeculationController]) -> World:
    """Drafts that come true less than half as often as is believed, whatever comes of them."""
    world = make_world(controller, 4, {"accuracy": 0.3, "confidence": 0.9, "seconds": 2e-4, "per_choice_s": 2e-5})
    world.controller.stats["guess"].calibration.probability = lambda confidence: 0.8  # type: ignore[method-assign]
    return world


def test_what_predictions_get_wrong_is_seen_by_comparison():
    without = rate_without(4, 200, 600)
    believing = overrated(Uncompared).run(200).rate(600)
    comparing = overrated(SpeculationController).run(200).rate(600)
    assert believing < 0.95 * without
    assert comparing > 0.98 * without


# -- whom it costs -----------------------------------------------------------------------------------------------------

COPIES: dict[str, Any] = {
    "accuracy": 0.0,
    "confidence": 0.9,
    "length": 16,
    "seconds": 1e-4,
    "coverage": 0.0,
    "coverage_of": {0: 1.0},
    "accuracy_of": {0: 0.97},
}
"""One of the choices repeats what is known, and the others say what is new."""


def mixed(controller: Callable[[], SpeculationController], num_choices: int) -> tuple[World, float]:
    """And the longest mean time between tokens of the others, relative to no drafting."""
    world = make_world(controller, num_choices, COPIES, noise=0.0, outliers=0.0)
    world.run(600)
    plain = float(two_cores(num_choices)) + num_choices * CHOICE_S
    return world, world.clock[0] / min(world.tokens_of[1:]) / plain


@pytest.mark.parametrize("num_choices", [2, 8, 32])
def test_one_that_copies_makes_no_other_wait_longer_by_more_than_a_tenth(num_choices):
    world, longest = mixed(SpeculationController, num_choices)
    assert longest < 1.1
    assert world.tokens_of[0] > 1.3 * world.tokens_of[1]


def test_without_the_bound_they_would_wait():
    assert mixed(Reckless, 2)[1] > 1.3
    assert mixed(Reckless, 8)[1] > 1.15
