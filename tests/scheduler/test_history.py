"""A choice's history equals the counts of an observer who sees the plans and a clock."""

import random
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest

from model_runner.contract import SamplingParams
from scheduler.engine import Engine
from scheduler.interface import (
    BeamSearch,
    ChoiceHistory,
    ChoiceState,
    EngineRequest,
    FinishReason,
    MethodDrafts,
    SchedulerConfig,
)
from scheduler.scheduler import Scheduler
from tests.scheduler.driving import CONFIG
from tests.scheduler.simulated_runner import SimulatedRunner
from tests.scheduler.simulated_world import expected_output


def wanted(name, num_prompt, max_tokens, n=1):
    """None of its choices runs into a poisoned token."""
    choices = tuple(map(ChoiceState, range(n)))
    for seed in range(1000):
        request = EngineRequest(f":{name}", tuple(range(num_prompt)), SamplingParams(seed=seed), max_tokens, choices)
        if all(expected_output(request, index)[2] is not FinishReason.ERROR for index in range(n)):
            break
    return request


@dataclass
class Seen:
    """A step."""

    start: float
    end: float
    admitted: set
    keys: set
    is_lost: bool


class Onlooker(SimulatedRunner):
    """Steps take as long as they have rows, and nothing else takes any time."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.now = 100.0
        self.steps = []
        self.works = {}

    def prepare(self, sampling, num_choices):
        return self.works.get(sampling.grammar)

    def execute(self, plan):
        start = self.now
        self.now += sum(share.num_rows for share in plan.scheduled)
        result = super().execute(plan)
        admitted = {choice.key for choice in plan.admitted}
        self.steps.append(Seen(start, self.now, admitted, set(plan.keys), bool(result.out_of_memory)))
        return replace(result, choices=tuple(replace(choice, method="right") for choice in result.choices))


@dataclass
class Truth:
    """Everything that happened to a choice, with times."""

    arrived_at: float
    outputs: list = field(default_factory=list)
    output_times: list = field(default_factory=list)

    def history(self, key, index, num_prompt, steps, now):
        """All counted from the beginning."""
        admissions = [step.start for step in steps if key in step.admitted]
        mine = [step for step in steps if not step.is_lost and {key, f"{key}/guide"} & step.keys]
        firsts = [min((t for t in self.output_times if t > at), default=None) for at in admissions]
        bounds = [*admissions, None][1:]
        prefills = 0
        for begin, first, end in zip(admissions, firsts, bounds, strict=False):
            last = min((t for t in (first, end) if t is not None), default=now)
            prefills += sum(begin <= step.start and step.end <= last for step in mine)
        with_tokens = [t for t, output in zip(self.output_times, self.outputs, strict=True) if output.tokens]
        accepted = sum(output.num_accepted for output in self.outputs)
        rejected = sum(output.num_rejected for output in self.outputs)
        return {
            "choice": index,
            "arrived_at": self.arrived_at,
            "as_of": now,
            "prompt_tokens": num_prompt,
            "admitted_at": admissions[0] if admissions else None,
            "first_token_at": min(with_tokens, default=None),
            "output_tokens": sum(len(output.tokens) for output in self.outputs),
            "steps": len(mine),
            "prefill_steps": prefills,
            "drafts": (MethodDrafts("right", accepted, rejected),) if accepted or rejected else (),
        }


class Watched:
    """An engine, and what is seen of it from outside."""

    def __init__(self, config=CONFIG, num_blocks=32, num_draft=0):
        self.runner = Onlooker(num_blocks, config.block_size, num_draft)
        self.engine = Engine(Scheduler(config, num_blocks, clock=lambda: self.runner.now), self.runner)
        self.requests = {}
        self.truths = {}
        self.ends = {}

    def add(self, request):
        self.engine.add(request)
        self.requests[request.request_id] = request
        for choice in request.choices:
            self.truths[request.request_id, choice.index] = Truth(self.runner.now)

    def step(self):
        for output in self.engine.step():
            truth = self.truths[output.request_id, output.choice]
            if output.finish_reason is not FinishReason.ERROR:
                truth.outputs.append(output)
                truth.output_times.append(self.runner.now)
            if output.finish_reason is not None:
                self.end(output.request_id, output.history)
        for request_id in self.requests:
            for history in self.engine.explain(request_id):
                self.check(request_id, history)
                assert not history.has_ended

    def abort(self, request_id, choice):
        for history in self.engine.abort(request_id, choice):
            self.end(request_id, history)

    def end(self, request_id, history):
        assert (request_id, history.choice) not in self.ends
        assert history.has_ended
        self.check(request_id, history)
        self.ends[request_id, history.choice] = history

    def check(self, request_id, history: ChoiceHistory):
        truth = self.truths[request_id, history.choice]
        num_prompt = len(self.requests[request_id].prompt)
        key = f"{request_id}/{history.choice}"
        expected = truth.history(key, history.choice, num_prompt, self.runner.steps, self.runner.now)
        assert {name: getattr(history, name) for name in expected} == expected
        parts = (history.queue_s, history.prefill_s, history.decode_s)
        assert sum(part for part in parts if part is not None) == history.as_of - history.arrived_at
        if truth.outputs:
            assert history.cached_tokens == truth.outputs[0].num_cached_tokens
        num_admitted = sum(key in step.admitted for step in self.runner.steps)
        is_back = history.is_waiting and history.admitted_at is not None
        assert history.preemptions == max(0, num_admitted - 1) + is_back or history.has_ended


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_is_told_as_it_was(seed):
    pick = random.Random(seed)
    config = SchedulerConfig(4, 6, pick.choice([3, 8, 32]), 48, policy=pick.choice(["fcfs", "priority", "fair"]))
    watched = Watched(config, num_blocks=pick.randint(12, 24), num_draft=pick.choice([0, 3]))
    for name in range(14):
        request = wanted(f"r{name}", pick.randint(1, 14), pick.randint(0, 12), n=pick.randint(1, 3))
        if pick.random() < 0.2:
            request = replace(request, sampling=SamplingParams(seed=pick.randint(0, 99)))  # some of these fail
        if pick.random() < 0.3:
            sampling = replace(request.sampling, guidance=1.5)
            request = replace(request, guide=(1,) * pick.randint(1, 12), sampling=sampling, choices=(ChoiceState(0),))
        watched.add(replace(request, priority=pick.randint(0, 1)))
        for _ in range(pick.randint(0, 4)):
            watched.step()
        watched.runner.most_tokens = pick.choice([None, None, None, 5])
        if pick.random() < 0.2:
            watched.abort(request.request_id, pick.choice([None, 0]))
    watched.runner.most_tokens = None
    while watched.engine.has_work:
        watched.step()
    assert watched.ends.keys() == watched.truths.keys()


def test_random_traffic_has_what_is_to_be_told():
    """The seeds above would show nothing of preemptions, say, if there were none."""
    ends = []
    for seed in range(12):
        pick = random.Random(seed)
        watched = Watched(replace(CONFIG, max_num_batched_tokens=8), num_blocks=pick.randint(8, 12), num_draft=2)
        for name in range(6):
            watched.add(wanted(f"r{name}", 10, 12))
        while watched.engine.has_work:
            watched.step()
        ends += watched.ends.values()
    assert any(history.preemptions > 1 for history in ends)
    assert any(history.cached_tokens for history in ends)
    assert any(history.prefill_steps > 2 for history in ends)
    assert any(history.drafts for history in ends)


def test_a_preempted_choice_tells_how_long_it_waited_again():
    watched = Watched(replace(CONFIG, prefix_caching=False), num_blocks=6)
    for name in ("first", "second"):
        watched.add(wanted(name, 8, 12))
    waits = []
    while watched.engine.has_work:
        before = watched.runner.now
        watched.step()
        if any(history.is_waiting for history in watched.engine.explain(":second")):
            waits.append(watched.runner.now - before)
    history = watched.ends[":second", 0]
    num_admitted = sum(":second/0" in step.admitted for step in watched.runner.steps)
    assert history.preemptions == num_admitted - 1 > 0
    assert watched.ends[":first", 0].preemptions == 0
    assert history.waited_again_s == sum(waits) > 0
    assert history.waited_again_s < history.decode_s  # of which it is a part
    assert history.prefill_steps == num_admitted


def test_a_step_without_memory_counts_for_nobody_and_who_makes_room_was_preempted():
    watched = Watched()
    watched.runner.most_tokens = 16
    for name, num_prompt in (("small", 3), ("large", 20)):
        watched.add(wanted(name, num_prompt, 4))
    watched.step()
    (small,), (large,) = watched.engine.explain(":small"), watched.engine.explain(":large")
    assert (small.steps, small.preemptions, small.is_waiting) == (0, 0, False)
    assert (large.steps, large.preemptions, large.is_waiting) == (0, 1, True)
    while watched.engine.has_work:
        watched.step()
    assert (watched.ends[":small", 0].steps, watched.ends[":small", 0].prefill_steps) == (4, 1)


def test_the_steps_of_a_search_count_once_and_all_its_choices_tell_the_same():
    watched = Watched(replace(CONFIG, max_num_batched_tokens=4))
    request = replace(wanted("a", 10, 5, n=2), beam_search=BeamSearch(3))
    watched.engine.add(request)
    ends = {}
    while watched.engine.has_work:
        ends |= {output.choice: output for output in watched.engine.step() if output.finish_reason is not None}
    steps = watched.runner.steps
    for choice, output in ends.items():
        history = output.history
        assert (history.choice, history.steps, history.prefill_steps) == (choice, len(steps), 3)
        assert (history.admitted_at, history.first_token_at, history.as_of) == (100.0, steps[2].end, steps[-1].end)
        assert history.prompt_tokens == 10
    assert replace(ends[0].history, choice=1, output_tokens=0) == replace(ends[1].history, output_tokens=0)
    assert ends[0].history.output_tokens == 5


def test_an_aborted_choice_of_a_search_ends_and_the_others_go_on():
    watched = Watched()
    watched.engine.add(replace(wanted("a", 6, 8, n=2), beam_search=BeamSearch(3)))
    watched.engine.step()
    (ended,) = watched.engine.abort(":a", 1)
    assert (ended.choice, ended.has_ended, ended.steps) == (1, True, 1)
    assert [(one.choice, one.has_ended) for one in watched.engine.explain(":a")] == [(0, False)]


def test_a_resumed_choice_tells_what_this_engine_did():
    request = wanted("a", 6, 8)
    tokens = expected_output(request, 0)[0]
    watched = Watched()
    watched.add(replace(request, choices=(ChoiceState(0, tuple(tokens[:5])),)))
    while watched.engine.has_work:
        watched.step()
    history = watched.ends[":a", 0]
    assert (history.prompt_tokens, history.output_tokens, history.steps, history.prefill_steps) == (6, 3, 3, 1)


@pytest.mark.parametrize("how", ["it runs", "it cannot run", "aborted"])
def test_what_has_to_be_prepared_waits_from_its_arrival(how):
    watched = Watched()
    watched.runner.works["g"] = work = Future()
    held = wanted("held", 6, 2)
    watched.engine.add(replace(held, sampling=replace(held.sampling, grammar="g")))
    watched.add(wanted("other", 8, 3))
    watched.step()
    (so_far,) = watched.engine.explain(":held")
    assert (so_far.arrived_at, so_far.queue_s, so_far.is_waiting, so_far.steps) == (100.0, 8.0, True, 0)
    if how == "aborted":
        (ended,) = watched.engine.abort(":held")
        assert (ended.has_ended, ended.is_waiting, ended.queue_s, ended.admitted_at) == (True, False, 8.0, None)
        return
    outcome = (lambda: work.set_result(None)) if how == "it runs" else lambda: work.set_exception(ValueError("no"))
    outcome()
    outputs = []
    while watched.engine.has_work:
        outputs += [output for output in watched.engine.step() if output.request_id == ":held"]
    history = outputs[-1].history
    assert (history.arrived_at, history.queue_s) == (100.0, 8.0)
    assert history.steps == (2 if how == "it runs" else 0)


def test_nobody_knows_a_history_of_what_is_unknown():
    engine = Watched().engine
    assert engine.explain(":a") == []
    assert engine.abort(":a") == []
