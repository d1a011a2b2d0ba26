"""Which steps are remembered, and what is reported about them."""

import time

from model_runner.runner_interface import SpeculationStats
from scheduler.interface import EngineStats
from server.engine.step_log import MOST_STEPS, DoneStep, StepLog


def told(*snapshots: EngineStats) -> StepLog:
    """The log of an engine that told these, one after the other."""
    log = StepLog()
    for before, after in zip((EngineStats(), *snapshots), snapshots, strict=False):
        log.note(before, after)
    return log


def drafts(method: str, drafted: int, *accepted: int) -> SpeculationStats:
    return SpeculationStats(method, drafted, accepted, accepted, 0, 0, 0.0, 0.0)


def test_a_step_is_the_difference_of_two_snapshots():
    first = EngineStats(2, 1, steps_done=1, prefill_tokens=40, step_s=0.25)
    second = EngineStats(
        *(2, 0, 0.5), steps_done=2, prefill_tokens=45, decode_tokens=2, step_s=0.375, steps=3,
        speculation=(drafts("ngram", 5, 2, 1),),
    )  # fmt: skip
    third = EngineStats(
        1, steps_done=3, prefill_tokens=45, decode_tokens=4, step_s=0.5,
        speculation=(drafts("ngram", 9, 3, 1), drafts("suffix", 4, 1)),
    )  # fmt: skip
    before = time.time()
    steps = told(first, second, third).since(0)
    assert before <= steps[0].ended_unix <= steps[1].ended_unix <= steps[2].ended_unix <= time.time()
    expected = [(0.25, 40, 0, 0, 0, 2, 1), (0.125, 5, 2, 5, 3, 2, 0), (0.125, 0, 2, 8, 2, 1, 0)]
    assert steps == [
        DoneStep(number, step.ended_unix, *values)
        for number, (step, values) in enumerate(zip(steps, expected, strict=True), 1)
    ]


def test_what_is_told_without_a_step_is_none():
    done = EngineStats(1, steps_done=1)
    log = told(EngineStats(num_waiting=1), done, EngineStats(0, steps_done=1), EngineStats(0, steps_done=2))
    assert [(step.number, step.num_running) for step in log.since(0)] == [(1, 1), (2, 0)]


def test_the_next_engine_counts_from_nothing_and_numbers_go_on():
    log = told(EngineStats(steps_done=1, prefill_tokens=7), EngineStats(steps_done=2, prefill_tokens=9))
    log.note(EngineStats(), EngineStats(steps_done=1, prefill_tokens=5))
    assert [(step.number, step.prefill_tokens) for step in log.since(0)] == [(1, 7), (2, 2), (3, 5)]


def test_the_last_are_remembered():
    log = told(*(EngineStats(steps_done=done, decode_tokens=2 * done) for done in range(1, MOST_STEPS + 11)))
    assert log.num_steps == MOST_STEPS + 10
    assert [step.number for step in log.since(0)] == list(range(11, MOST_STEPS + 11))
    assert {step.decode_tokens for step in log.since(0)} == {2}
    assert [step.number for step in log.since(MOST_STEPS + 8)] == [MOST_STEPS + 9, MOST_STEPS + 10]
    assert log.since(MOST_STEPS + 10) == []
