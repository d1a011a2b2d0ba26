"""Work that gets only the room that others leave: it never delays them, and gets what there is."""

from dataclasses import replace
from itertools import count

import pytest

from scheduler.interface import BACKGROUND, BeamSearch
from scheduler.step_size import BackgroundBudget, OthersLoad
from tests.scheduler.driving import make_engine, make_request, run, shares, tokens_of


def background(name, *arguments, **fields):
    return replace(make_request(name, *arguments, **fields), tier=BACKGROUND)


def admissions(engine):
    return [[entry.key.strip(":") for entry in plan.admitted] for plan in engine.runner.plans]


# -- how much is added to a step ---------------------------------------------------------------------------------------


class Device:
    """Steps take so long for rows: flat at first, as memory is read once, then more with each."""

    def __init__(self, flat, each):
        self.flat = flat
        self.each = each

    def seconds(self, rows):
        return 1.0 + max(0, rows - self.flat) * self.each


def drive(room, device, num_steps, rows_of=lambda step: 1, *, only_decodes=True):
    """Time of all steps relative to steps without background work, and the mean number of added tokens per step."""
    took = alone = added = 0.0
    for step in range(num_steps):
        others = OthersLoad(rows_of(step), only_decodes)
        tokens = room.num_tokens(others, 1)
        seconds = device.seconds(others.num_rows + tokens)
        room.observe(others, tokens, seconds)
        took, alone, added = took + seconds, alone + device.seconds(others.num_rows), added + tokens
    return took / alone, added / num_steps


@pytest.mark.parametrize("device", [Device(1, 0.03), Device(1, 0.3), Device(8, 0.1), Device(0, 5.0)])
@pytest.mark.parametrize("rows_of", [lambda step: 1, lambda step: 8, lambda step: 1 + step % 7, lambda step: 40])
def test_others_lose_less_than_a_tenth_of_their_time(device, rows_of):
    slower, added = drive(BackgroundBudget(512), device, 3000, rows_of)
    assert slower < 1.1
    assert added > 0, "and something is done"


def test_where_rows_cost_nothing_all_of_it_is_in_nearly_every_step():
    slower, added = drive(BackgroundBudget(512), Device(1000, 1.0), 1000)
    assert slower == 1
    assert added > 0.8 * 512


def test_what_is_added_follows_what_it_costs():
    room = BackgroundBudget(512)
    _, much = drive(room, Device(1, 0.001), 1000)
    _, little = drive(room, Device(1, 0.3), 1000)
    assert much > 10 * little > 0


def test_nothing_is_added_beside_prompts_or_before_steps_without_it_were_seen():
    room, others = BackgroundBudget(512), OthersLoad(1, only_decodes=True)
    assert room.num_tokens(others, 1) == 0
    room.observe(others, 0, 1.0)
    assert room.num_tokens(others, 1) > 0
    assert room.num_tokens(OthersLoad(3, only_decodes=True), 1) == 0, "steps of this size were not seen"
    assert drive(room, Device(1, 0.0), 100, only_decodes=False)[1] == 0
    assert room.num_tokens(OthersLoad(0, only_decodes=True), 1) == 128, "alone it has a part of a step, soon over"


def test_what_a_costly_step_took_is_paid_back_however_long_nothing_was_added_before():
    room, others = BackgroundBudget(512), OthersLoad(1, only_decodes=True)
    for _ in range(1000):
        room.observe(others, 0, 1.0)
    room.observe(others, 4, 3.0)  # two seconds more than others would have taken, of which one was saved up
    for _ in range(16):
        assert room.num_tokens(others, 1) == 0
        room.observe(others, 0, 1.0)
    room.observe(others, 0, 1.0)
    assert room.num_tokens(others, 1) > 0


# -- in the scheduler --------------------------------------------------------------------------------------------------


def test_alone_it_runs_as_anything_does():
    outputs = run(make_engine(), background("b", 6, 4, n=2))
    assert tokens_of(outputs[":b", 1]) == tokens_of(run(make_engine(), make_request("b", 6, 4, n=2))[":b", 1])


@pytest.mark.parametrize("settings", [{"max_num_seqs": 2}, {"num_blocks": 6}], ids=["for a place", "for memory"])
def test_whoever_comes_does_not_wait_for_it(settings):
    engine = make_engine(prefix_caching=False, **settings)
    for name in "pqr":
        engine.add(background(name, 8, 8))
    outputs = {}
    for _ in range(3):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    engine.add(make_request("a", 8, 4))
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_background_waiting) == (4 - stats.num_running, 3 - stats.num_running)
    assert stats.num_background_waiting > 0
    assert stats.num_background_running == stats.num_running > 0
    before = len(engine.runner.plans)
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    assert admissions(engine)[before][0] == "a/0", "in the next step"
    assert engine.stats().preemptions > 0
    for name in "pqr":
        alone = run(make_engine(), background(name, 8, 8))
        assert tokens_of(outputs[f":{name}"]) == tokens_of(alone[f":{name}", 0])


def test_what_others_compute_is_the_same_beside_it():
    """Step by step: it takes none of their tokens, of prompts and of answers."""
    plans = {}
    for is_beside in (False, True):
        engine = make_engine(max_num_batched_tokens=8, num_blocks=40, prefix_caching=False)
        if is_beside:
            for index in range(8):
                engine.add(background(f"b{index}", 12, 30))
            for _ in range(4):
                engine.step()
        before = len(engine.runner.plans)
        for name in "xyz":
            engine.add(make_request(name, 14, 6))
        while not {":x", ":y", ":z"}.isdisjoint(engine.scheduler._choices._live):
            engine.step()
        mine = [{key: count for key, count in shares(plan).items() if key[0] in "xyz"}
                for plan in engine.runner.plans[before:]]  # fmt: skip
        plans[is_beside] = mine
    assert plans[True] == plans[False]


def test_beside_others_it_goes_on_when_steps_allow():
    engine = make_engine(num_blocks=40)
    engine.add(background("b", 4, 20))
    engine.step()
    engine.add(make_request("a", 4, 40))
    run(engine)
    mixed = [plan for plan in engine.runner.plans if {"a/0", "b/0"} <= shares(plan).keys()]
    alone = [plan for plan in engine.runner.plans if "a/0" in shares(plan) and "b/0" not in shares(plan)]
    assert mixed
    assert alone


def test_it_is_not_admitted_before_those_who_wait():
    engine = make_engine(max_num_seqs=1)
    for request in (background("b"), make_request("a"), background("c"), make_request("d")):
        engine.add(request)
    run(engine)
    assert [keys for keys in admissions(engine) if keys] == [["a/0"], ["d/0"], ["b/0"], ["c/0"]]


def test_groups_go_on_too_alone_and_beside_others():
    """Whose members must be computed together, however little room there is."""
    for beside in (False, True):
        engine = make_engine(max_num_batched_tokens=16, num_blocks=64, max_num_seqs=12)
        engine._clock = count().__next__  # every step takes the same time
        search = replace(background("s", 4, 6, beam_candidates=16), beam_search=BeamSearch(8))
        engine.add(search)
        if beside:
            engine.add(make_request("a", 4, 40))
        steps = 0
        while ":s" in engine.scheduler._searches:
            engine.step()
            steps += 1
            assert steps < 400
            if beside and ":a" not in engine.scheduler._choices:
                engine.add(make_request("a", 4, 40))


def test_steps_ahead_do_not_keep_others_waiting():
    engine = make_engine(max_num_seqs=1, num_blocks=40)
    engine.add(background("b", 4, 40))
    plan = engine.scheduler.schedule()
    result = engine.runner.execute(plan)
    engine.add(make_request("a", 4, 4))
    assert engine.scheduler.schedule_ahead(plan) is None
    engine.scheduler.update(plan, result)
    assert [entry.key for entry in engine.scheduler.schedule().admitted] == [":a/0"]


def test_steps_ahead_are_planned_where_all_is_background_work():
    engine = make_engine(max_num_seqs=2, num_blocks=40)
    engine.add(background("b", 4, 40))
    for _ in range(2):
        plan = engine.scheduler.schedule()
        engine.scheduler.update(plan, engine.runner.execute(plan))
    plan = engine.scheduler.schedule()
    assert engine.scheduler.schedule_ahead(plan) is not None
    beside = make_engine(max_num_seqs=2, num_blocks=40)
    beside.add(make_request("a", 4, 40))
    beside.add(background("b", 4, 40))
    for _ in range(2):
        plan = beside.scheduler.schedule()
        beside.scheduler.update(plan, beside.runner.execute(plan))
    assert beside.scheduler.schedule_ahead(beside.scheduler.schedule()) is None


def test_one_slow_step_is_soon_forgotten():
    room = BackgroundBudget(512)
    others = OthersLoad(1, only_decodes=True)
    room.observe(others, 0, 100.0)
    slow = 0
    for _ in range(300):
        tokens = room.num_tokens(others, 1)
        seconds = 1.0 + 0.1 * tokens
        slow += seconds > 10
        room.observe(others, tokens, seconds)
    assert slow <= 3
