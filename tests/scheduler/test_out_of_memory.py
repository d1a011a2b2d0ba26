"""Steps for which the device's memory runs out: nothing is lost, nobody starves, and nothing loops."""

import logging
from dataclasses import replace

import pytest

from model_runner.contract import SamplingParams, ScheduledRequest, StepPlan
from scheduler import step_size
from scheduler.interface import BeamSearch, ChoiceState, EngineRequest, FinishReason, SchedulerConfig
from scheduler.step_size import OUT_OF_MEMORY, StepLimit
from scheduler.waiting_queue import make_queue
from tests.scheduler.driving import CONFIG, make_engine, make_request, run, shares, tokens_of
from tests.scheduler.simulated_beams import expected_sequences
from tests.scheduler.simulated_world import World, expected_output, make_groups

# -- what happens ------------------------------------------------------------------------------------------------------


def test_the_largest_goes_back_into_the_queue_and_steps_become_smaller():
    engine = make_engine()
    small, large = make_request("small", 3, 4), make_request("large", 20, 4)
    engine.runner.most_tokens = 16
    outputs = run(engine, small, large)
    for request in (small, large):
        assert tokens_of(outputs[request.request_id, 0]) == expected_output(request, 0)[0]
    assert [shares(plan) for plan in engine.runner.plans[:3]] == [
        {"small/0": 3, "large/0": 20},  # fails
        {"small/0": 3, "large/0": 8},
        {"small/0": 1, "large/0": 10},
    ]
    assert engine.runner.plans[1].released == (":large/0",)
    stats = engine.stats()
    assert (stats.out_of_memory, stats.preemptions, stats.kv_usage) == (1, 1, 0.0)


def test_the_one_that_came_first_keeps_what_it_has():
    engine = make_engine(max_num_batched_tokens=16)
    first, second = make_request("first", 30, 4), make_request("second", 2, 4)
    engine.add(first)
    engine.step()
    engine.runner.most_tokens = 8
    outputs = run(engine, second)
    assert tokens_of(outputs[":first", 0]) == expected_output(first, 0)[0]
    assert tokens_of(outputs[":second", 0]) == expected_output(second, 0)[0]
    steps = [shares(plan) for plan in engine.runner.plans[:4]]
    assert steps == [{"first/0": 16}, {"first/0": 14, "second/0": 2}, {"first/0": 8}, {"first/0": 6, "second/0": 2}]
    assert engine.stats().preemptions == 0


def test_a_choice_that_cannot_be_computed_even_alone_fails_alone():
    engine = make_engine()
    engine.runner.most_tokens = 0
    engine.add(make_request("a", 12, 4))
    engine.add(make_request("b", 3, 4))
    outputs = []
    for _ in range(12):
        outputs += engine.step()
        engine.check_integrity()
        if outputs:
            engine.runner.most_tokens = None
    (failed, *others) = outputs
    assert (failed.request_id, failed.finish_reason, failed.error) == (":a", FinishReason.ERROR, OUT_OF_MEMORY)
    assert tokens_of(others) == expected_output(make_request("b", 3, 4), 0)[0]
    assert not engine.has_work
    assert engine.stats().out_of_memory == 4  # steps of 15, 7, 3 and 1 tokens


def test_a_failure_is_logged_for_whoever_has_to_mend_it(caplog):
    engine = make_engine()
    engine.runner.most_tokens = 16
    with caplog.at_level(logging.WARNING, "samewise.scheduler"):
        run(engine, make_request("small", 3, 4), make_request("large", 20, 4))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "23 tokens for :large/0 (20), :small/0 (3); :large/0 goes back to the queue" in line
    assert "at most 11 tokens for now" in line
    assert "lower max_num_batched_tokens or kv_cache_gib" in line
    assert line.endswith("tried to allocate more than there is")


def test_larger_steps_are_tried_again_later():
    engine = make_engine(num_blocks=200, max_model_len=600)
    engine.runner.most_tokens = 8
    engine.add(make_request("a", 16, 290, seed=22))
    engine.step()
    engine.runner.most_tokens = None
    for _ in range(1 + step_size._PATIENCE):
        engine.step()
    plans = engine.runner.plans
    engine.add(make_request("b", 30, 2))
    engine.step()
    assert [sum(shares(plan).values()) for plan in (*plans[:3], plans[-1])] == [16, 8, 8, 15]


def test_a_choice_that_ends_while_its_step_fails_is_not_missed():
    engine = make_engine()
    engine.runner.most_tokens = 1
    engine.add(make_request("a"))
    plan = engine.scheduler.schedule()
    result = engine.runner.execute(plan)
    engine.abort(":a")
    assert engine.scheduler.update(plan, result) == []
    assert not engine.has_work
    engine.check_integrity()


# -- groups ------------------------------------------------------------------------------------------------------------


def make_search(width):
    choices = (ChoiceState(0), ChoiceState(1))
    sampling = SamplingParams(temperature=0.0)
    return EngineRequest(":search", (0, 1, 2, 3, 4, 5), sampling, 8, choices, beam_search=BeamSearch(width))


@pytest.mark.parametrize("groups", [(), make_groups(CONFIG, 64)])
@pytest.mark.parametrize("most_tokens", [4, 5, 7])
def test_beams_are_preempted_and_made_smaller_together(most_tokens, groups):
    engine = make_engine(num_blocks=64, groups=groups)
    search, guided = make_search(4), replace(make_request("guided", 5, 6, guidance=1.5), guide=(1, 2, 3))
    others = [make_request(f"o{index}", 2 + index, 6) for index in range(3)]
    engine.runner.most_tokens = most_tokens
    outputs = run(engine, search, guided, *others)
    for choice, expected in enumerate(expected_sequences(search)[:2]):
        assert tuple(tokens_of(outputs[":search", choice])) == expected.beam.tokens
    for request in (guided, *others):
        assert tokens_of(outputs[request.request_id, 0]) == expected_output(request, 0)[0]
    assert engine.stats().out_of_memory > 0


def test_a_search_that_is_too_wide_for_the_memory_fails_and_the_others_go_on():
    engine = make_engine(num_blocks=64)
    engine.runner.most_tokens = 3
    search, other = make_search(4), make_request("other", 5, 6)
    outputs = run(engine, search, other)
    assert [outputs[":search", choice][-1].error for choice in range(2)] == [OUT_OF_MEMORY] * 2
    assert tokens_of(outputs[":other", 0]) == expected_output(other, 0)[0]


def test_candidates_that_are_too_many_for_the_memory_fail_their_choice():
    engine = make_engine()
    engine.runner.most_tokens = 1
    outputs = run(engine, make_request("a", 6, 4, top_k=30, penalty_alpha=0.5))
    assert outputs[":a", 0][-1].error == OUT_OF_MEMORY


# -- random traffic ----------------------------------------------------------------------------------------------------


class CrampedWorld(World):
    """The runner has memory for steps of some number of tokens, which changes now and then."""

    failed_alone = ""

    def _step(self):
        if self.random.random() < 0.05:
            self.runner.most_tokens = self.random.choice([None, *range(1, self.config.max_num_batched_tokens)])
        super()._step()

    def _check_order(self, plan):
        """Who is largest changes the order; what is checked is that everybody's deadline holds."""
        num_tokens = sum(share.num_rows for share in plan.scheduled)
        if self.runner.most_tokens is not None and num_tokens > self.runner.most_tokens:
            self.tally["out of memory"] += 1
            self.failed_alone = plan.scheduled[0].key if len(plan.scheduled) == 1 else ""
            for watched in self.live.values():  # a step is lost, and perhaps all that one choice had computed
                watched.deadline += 1 + max(other.work for other in self.live.values())

    def _check_finished(self, watched, output):
        if output.error == OUT_OF_MEMORY:
            assert self.most_candidates, "there was memory for every single token"
            assert watched.key == self.failed_alone
            assert watched.tokens == expected_output(watched.request, watched.index)[0][: len(watched.tokens)]
            self.tally["failed"] += 1
        else:
            super()._check_finished(watched, output)


WORLDS = [
    (SchedulerConfig(4, 6, 16, 60), 20, {}),
    (SchedulerConfig(8, 6, 12, 60), 9, {"num_draft": 3}),
    (SchedulerConfig(4, 6, 64, 60, prefix_caching=False), 24, {"num_draft": 2}),
    (SchedulerConfig(4, 6, 12, 60, "priority"), 18, {}),
    (SchedulerConfig(4, 6, 24, 60, "fair"), 20, {"num_draft": 3}),
    (SchedulerConfig(4, 6, 16, 60), 20, {"num_draft": 2, "most_candidates": 6}),
    (SchedulerConfig(4, 6, 16, 60), 20, {"num_draft": 2, "groups": make_groups(SchedulerConfig(4, 6, 16, 60), 20)}),
]


@pytest.mark.parametrize(("seed", "config", "num_blocks", "more"), [(i, *world) for i, world in enumerate(WORLDS)])
def test_output_is_that_of_brute_force_and_nothing_leaks(seed, config, num_blocks, more, caplog, monkeypatch):
    monkeypatch.setattr(step_size, "_PATIENCE", 8)  # so that larger steps are tried, and fail, often
    caplog.set_level(logging.ERROR, "samewise.scheduler")
    world = CrampedWorld(seed, config, num_blocks, **more).run(num_steps=3000)
    assert world.tally["out of memory"] > 50
    assert world.preemptions > 50
    assert world.tally["resumed"] > 0
    assert (world.tally["failed"] > 0) == ("most_candidates" in more)
    assert all(world.tally[reason] > 5 for reason in FinishReason)


def test_each_failure_begins_the_wait_for_larger_steps_anew():
    limit, waiting = StepLimit(64, lambda request: (request.arrival,)), make_queue("fcfs")
    for num_tokens in (64, 32):
        limit.decide(StepPlan((), (), (), (ScheduledRequest("gone", num_tokens, ()),)), {}, "no memory")
        for _ in range(step_size._PATIENCE - 1):
            limit.note_success()
        assert limit.budget({}, waiting) == num_tokens // 2
    limit.note_success()
    assert limit.budget({}, waiting) == 32
