"""The speculator with simulated drafters and machines: drafts are verified where they pay, and whose they are."""

import itertools
import random

import numpy as np
import pytest

from model_runner.contract import AdmittedRequest, SamplingParams, ScheduledRequest, Speculation
from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.speculative.controller import SpeculationController
from model_runner.speculative.speculator import Speculator
from model_runner.speculative.step_times import StepLoad, StepTimes
from tests.model_runner.speculative.world import Guesser, Seconds, World, compute_bound, memory_bound

ROWS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])


def make_world(
    guessers: dict[str, Guesser], methods: list[str], curve: Seconds = memory_bound, noise: float = 0.05, **more: object
) -> World:
    controller = SpeculationController()
    controller.times = StepTimes(ROWS, np.array([curve(rows) for rows in ROWS]), 0.0)
    return World(guessers, methods, curve, controller=controller, noise=noise, **more)  # type: ignore[arg-type]


def plain_rate(num_choices: int, curve: Seconds) -> float:
    return num_choices / curve(num_choices)


def best_rate(num_choices: int, curve: Seconds, accuracy: float, length: int = 4) -> float:
    """The highest rate with the same number of drafts for each choice; chains are right until they are wrong."""
    gains = [sum(accuracy**depth for depth in range(1, count + 1)) for count in range(length + 1)]
    return max(num_choices * (1 + gain) / curve(num_choices * (1 + count)) for count, gain in enumerate(gains))


# -- what it brings ----------------------------------------------------------------------------------------------------


PLACES = list(itertools.product([memory_bound, compute_bound], [1, 8, 32], [0.0, 0.3, 0.7, 0.95]))


@pytest.mark.parametrize(
    ("curve", "num_choices", "accuracy", "seconds"),
    [(*place, 0.0 if sum(divmod(index, 4)) % 2 else 0.002) for index, place in enumerate(PLACES)],
)
def test_it_is_near_the_best_and_never_much_below_no_speculation(curve, num_choices, accuracy, seconds):
    world = make_world({"guess": Guesser(accuracy, seconds=seconds)}, ["guess"] * num_choices, curve)
    first = world.rate(100)
    later = world.rate(400)
    plain = plain_rate(num_choices, curve)
    assert first > 0.85 * plain  # it has to find out
    assert later > 0.96 * plain
    if seconds == 0:
        assert later > 0.95 * best_rate(num_choices, curve, accuracy)


@pytest.mark.parametrize("drift", [0.3, 3.0])
def test_a_machine_that_gets_faster_or_slower_changes_nothing(drift):
    world = make_world({"guess": Guesser(0.9)}, ["guess"] * 4, noise=0.1)
    world.run(500)
    world.true_seconds = lambda rows: memory_bound(rows) * drift
    assert world.rate(1000) * drift > 0.95 * best_rate(4, memory_bound, 0.9)


def test_a_drafter_that_has_rarely_something_to_say_is_used_when_it_has():
    world = make_world({"guess": Guesser(0.95, coverage=0.1)}, ["guess"], compute_bound)
    world.true_seconds = memory_bound
    world.run(2000)
    assert np.mean(np.array(world.verified[-500:]) > 0) > 0.07


# -- off and on --------------------------------------------------------------------------------------------------------


def num_steps_until_on(world: World, limit: int) -> int:
    for step in range(limit):
        world.step()
        if all(count > 0 for count in world.verified[-10:]):
            return step
    return limit


@pytest.mark.parametrize("seconds", [0.0, 0.002])
@pytest.mark.parametrize("num_choices", [8, 32])
def test_where_drafts_fail_it_turns_itself_off_and_probes_are_rare(seconds, num_choices):
    world = make_world({"guess": Guesser(0.02, seconds=seconds)}, ["guess"] * num_choices)
    world.run(40)
    world.verified.clear()
    start = world.clock[0]
    world.run(1000)
    assert max(world.verified) <= 4
    assert world.clock[0] - start < 1.015 * 1000 * memory_bound(num_choices)


@pytest.mark.parametrize(("num_choices", "seconds"), [(1, 0.0), (1, 0.002), (8, 0.0), (8, 0.002), (32, 0.0)])
def test_it_turns_itself_on_again_when_drafts_come_true(num_choices, seconds):
    guesser = Guesser(0.0, seconds=seconds)
    world = make_world({"guess": guesser}, ["guess"] * num_choices)
    world.run(1000)
    guesser.accuracy = 0.97
    assert num_steps_until_on(world, 1000) < 800


def test_it_turns_itself_on_again_where_steps_are_launched_before_drafts_are_made():
    """The drafts of a single look come too late; nobody shall take them for drafts that failed."""
    guesser = Guesser(0.0, seconds=0.002)
    world = make_world({"guess": guesser}, ["guess"])
    world.runs_ahead = True
    world.run(1000)
    guesser.accuracy = 0.97
    assert num_steps_until_on(world, 1000) < 800


def test_it_turns_itself_on_again_when_the_crowd_has_gone():
    """The same drafts: too much for a full batch, good for a small one. What is known of them stays."""
    guesser = Guesser(0.6, seconds=0.002)
    world = make_world({"guess": guesser}, ["guess"] * 32)
    world.run(500)
    assert np.mean(world.verified[-200:]) < 0.5
    for slot in range(1, 32):
        world.speculator.end(slot)
    world.methods, world.offers, world.verified = ["guess"], [0], []
    assert num_steps_until_on(world, 100) < 30


# -- who gets what -----------------------------------------------------------------------------------------------------


class Fixed:
    """Offers the given trees."""

    needs: frozenset[str] = frozenset()
    reads_step = True
    sees_all_steps = True

    def __init__(self, trees: dict[int, DraftTree]) -> None:
        self.trees = trees

    def begin(self, choice):
        pass

    def end(self, slot):
        pass

    def propose(self, step):
        return [self.trees[choice.slot] if choice.max_nodes else NO_DRAFT for choice in step.choices]


def random_tree(rng: random.Random, size: int) -> DraftTree:
    """With many equal confidences."""
    parents = tuple(rng.randint(-1, node - 1) for node in range(size))
    return DraftTree(tuple(range(size)), parents, tuple(rng.choice([0.2, 0.5, 0.9, 1.0]) for _ in range(size)))


@pytest.mark.parametrize("seed", range(20))
def test_exactly_the_best_nodes_are_verified(seed):
    rng = random.Random(seed)
    trees = {slot: random_tree(rng, rng.randint(0, 10)) for slot in range(6)}
    world = make_world({"fixed": Fixed(trees)}, ["fixed"] * 6, noise=0.0)  # type: ignore[dict-item]
    world.guessers["fixed"].accuracy = 0.0  # type: ignore[attr-defined]
    world.step()
    assert world.offers == [len(trees[slot]) for slot in range(6)]
    nodes = [(value, slot) for slot in range(6) for value in sorted(trees[slot].survival(), reverse=True)]
    nodes.sort(key=lambda node: -node[0])
    curve = np.interp(np.arange(80), ROWS, [memory_bound(rows) for rows in ROWS])
    best, best_rate = 0, 1 / world.controller._size(StepLoad(6, 0, 6)).trust
    for count in range(1, len(nodes) + 1):
        time = curve[6 + count] / curve[6]
        expected = [1 + sum(value for value, owner in nodes[:count] if owner == slot) for slot in range(6)]
        if time <= 1.08 * min(expected) + 0.08 and sum(expected) / 6 / time > best_rate:
            best, best_rate = count, sum(expected) / 6 / time
    scheduled = [ScheduledRequest(f"{slot}", 1, (), world.offers[slot]) for slot in range(6)]
    world.controller._to_try = -1.0  # each has waited one step without drafts; nothing is verified but what pays
    chosen = world.speculator.drafts(StepLoad(6, 0, 6), range(6), scheduled)
    values = sorted((value for tree in chosen for value in tree.survival()), reverse=True)
    assert values == pytest.approx([value for value, _ in nodes[:best]])


def test_what_a_request_insists_on_is_verified_as_far_as_there_is_room():
    world = make_world({"guess": Guesser(0.0, length=10)}, ["guess"] * 8, compute_bound, num_tokens=6)
    world.run(100)
    assert set(world.verified[1:]) == {48}
    scheduled = [ScheduledRequest(f"{slot}", 1, (), slot) for slot in range(8)]
    trees = world.speculator.drafts(StepLoad(8, 0, 8), range(8), scheduled)
    assert [len(tree) for tree in trees] == [0, 1, 2, 3, 4, 5, 6, 6]


def test_never_more_than_the_servers_limit():
    world = make_world({"guess": Guesser(0.9, length=100)}, ["guess"], num_tokens=50)
    world.run(3)
    assert world.verified[1:] == [16, 16]


def test_choices_without_speculation_get_none():
    world = make_world({"guess": Guesser(0.9)}, ["guess"])
    world.run(2)
    scheduled = [ScheduledRequest("other", 1, (), 5)]
    assert world.speculator.drafts(StepLoad(1, 0, 1), [7], scheduled) == [NO_DRAFT]


def test_lack_of_room_does_not_count_against_a_method():
    world = make_world({"guess": Guesser(0.9)}, ["guess"])
    world.run(200)
    known = world.controller.expected_gain("guess")
    for _ in range(50):
        world.offers = [0]
        world.step()
    assert world.controller.expected_gain("guess") == pytest.approx(known, rel=0.1)
    world.verified.clear()
    world.run(8)
    assert np.mean(world.verified) > 2


# -- auto --------------------------------------------------------------------------------------------------------------


def test_a_draft_counts_for_the_method_that_made_it():
    guessers = {"suffix": Guesser(0.9, coverage=0.5), "heads": Guesser(0.5, confidence=0.6, seconds=0.0005)}
    world = make_world(guessers, ["auto"] * 2, heads="heads")
    world.run(1000)
    stats = {entry.method: entry for entry in world.speculator.stats()}
    assert set(stats) == {"suffix", "heads"}
    for method, truth in (("suffix", 0.9), ("heads", 0.5)):
        entry = stats[method]
        assert entry.accepted_by_depth[0] / entry.verified_by_depth[0] == pytest.approx(truth, abs=0.06)
        probability = world.controller.stats[method].calibration.probability(guessers[method].confidence)
        assert probability == pytest.approx(truth, abs=0.2)
        assert entry.tokens == entry.steps + sum(entry.accepted_by_depth)
    assert stats["heads"].draft_s > 0


def test_heads_that_follow_see_every_step_and_draft_only_where_suffix_does_not():
    guessers = {"suffix": Guesser(0.97), "heads": Guesser(0.9, seconds=0.002, sees_all_steps=True)}
    world = make_world(guessers, ["auto"], heads="heads")
    world.run(300)
    guessers["heads"].asked = guessers["heads"].seen = 0
    world.run(300)
    assert guessers["heads"].seen == 300
    assert guessers["heads"].asked < 30
    guessers["suffix"].coverage = 0.0
    world.run(300)
    assert guessers["heads"].asked > 250


def test_auto_is_no_worse_than_its_best_member():
    rates = {}
    for method in ("auto", "suffix", "heads"):
        guessers = {"suffix": Guesser(0.95, coverage=0.3), "heads": Guesser(0.6, seconds=0.002)}
        world = make_world(guessers, [method], heads="heads")
        world.run(300)
        rates[method] = world.rate(2000)
    assert rates["auto"] > 0.97 * max(rates["suffix"], rates["heads"])


def test_a_method_serves_those_who_name_it_and_auto_in_one_call():
    guessers = {
        "suffix": Guesser(0.9, coverage=0.0, sees_all_steps=True),
        "heads": Guesser(0.9, seconds=0.001, sees_all_steps=True),
    }
    world = make_world(guessers, ["auto", "heads", "suffix"], heads="heads")
    world.run(10)
    assert guessers["heads"].seen == 20
    assert guessers["heads"].asked >= 5  # all but those held out
    assert guessers["suffix"].seen == 20


def test_begin_and_end_reach_all_members():
    guessers = {name: Guesser(0.9) for name in ("prediction", "suffix", "heads", "ngram")}
    world = make_world(guessers, ["auto"], heads="heads")
    world.run(2)
    assert [bool(guessers[name].running) for name in ("prediction", "suffix", "heads", "ngram")] == [1, 1, 1, 0]
    world.speculator.end(0)
    assert not any(guesser.running for guesser in guessers.values())
    world.speculator.end(0)  # as for a choice that does not speculate


def test_auto_is_a_method_if_it_has_members():
    assert Speculator({"suffix": Guesser(0.9)}, SpeculationController(), 8).methods == ("auto", "suffix")
    assert Speculator({"ngram": Guesser(0.9)}, SpeculationController(), 8).methods == ("ngram",)
    assert Speculator({"ngram": Guesser(0.9)}, SpeculationController(), 8, heads="ngram").methods == ("auto", "ngram")


def test_a_choice_that_does_not_ask_is_not_known_to_proposers():
    guesser = Guesser(0.9)
    speculator = Speculator({"guess": guesser}, SpeculationController(), 8)
    speculator.begin(0, [1], [], AdmittedRequest("a", (1,), 1, 0, (), SamplingParams()))
    assert not guesser.running
    speculator.begin(1, [1], [], AdmittedRequest("b", (1,), 1, 0, (), SamplingParams(), Speculation("guess")))
    assert guesser.running == {1}
