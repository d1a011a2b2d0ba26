"""Steps that are launched before the result of the one before: the same tokens, with graphs and without."""

from dataclasses import replace

import pytest
import torch

from model_runner.contract import Failure, SamplingParams, Speculation, StepPlan
from model_runner.runner import ModelRunner
from model_runner.runner_interface import LaunchedStep, Runner
from model_runner.sampling.sampler import NOT_FINITE
from scheduler.engine import Engine
from scheduler.interface import EngineRequest, SchedulerConfig
from scheduler.scheduler import Scheduler
from tests.model_runner.triton.tiny_engines import TinyEngines

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, seed=5)
REQUESTS = [
    EngineRequest("greedy", (1, 17, 23, 5), GREEDY, 10),
    EngineRequest("drawn", (1, 8, 9, 10, 11, 12), DRAWN, 7),
    EngineRequest("stopped", (1, 17, 23, 5), replace(GREEDY, stop_token_ids=tuple(range(0, 48, 3))), 9),
    EngineRequest("speculating", (1, 4, 4, 4, 4, 4), DRAWN, 6, speculation=Speculation("suffix")),
]
LATE = EngineRequest("late", (1, 39), replace(DRAWN, top_p=0.5), 3)
"""Comes when some steps were taken."""


class Waiting(Runner):
    """A runner whose steps are done when they are launched."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_blocks = runner.num_blocks

    def execute(self, plan):
        return self._runner.execute(plan)


def outputs(runner: ModelRunner | Waiting) -> tuple[dict[str, list[int]], int]:
    """Tokens by request, and how many steps were launched ahead."""
    engine = Engine(Scheduler(SchedulerConfig(16, 8, 64, 64, prefix_caching=False), runner.num_blocks), runner)
    for request in REQUESTS:
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    num_ahead = num_steps = 0
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
        num_ahead += engine._ahead is not None
        num_steps += 1
        if num_steps == 4:
            engine.add(LATE)
        engine.check_integrity()
    return tokens, num_ahead


def test_tokens_are_those_of_steps_one_after_the_other(tiny_engines: TinyEngines) -> None:
    runner = tiny_engines.cuda("llama", (1, 2, 4, 8)).runner
    expected, none = outputs(Waiting(runner))
    tokens, num_ahead = outputs(runner)
    assert tokens == expected
    assert none == 0
    assert num_ahead >= 3
    assert len(tokens["stopped"]) < 9, "it ends where nobody knew"


PREFIX = (1, 17, 23, 5, 8, 30, 44, 12, 9, 2, 3, 21, 40, 7, 33)
"""One token less than a block."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter meets NaN
def test_a_row_that_is_not_finite_is_its_choices_error_though_the_next_step_has_begun(
    tiny_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step, with one row fewer, has another choice's logits in this row."""
    runner = tiny_engines.cuda("llama", (1, 2, 4, 8)).runner
    requests = [
        EngineRequest("short", (1, 9, 11), GREEDY, 3),
        EngineRequest("hit", PREFIX, DRAWN, 5),
        EngineRequest("beside", (1, 40, 6, 7), DRAWN, 5),
    ]
    expected = run(new_engine(runner), requests)
    engine, launches, launch = new_engine(runner), [], runner.launch

    def spoiling(plan: StepPlan, *, is_ahead: bool = False) -> LaunchedStep:
        """In the third step, and in no other, the first value that "hit" sees is NaN."""
        launches.append((tuple(share.key for share in plan.scheduled), is_ahead))
        if len(launches) != 3:
            return launch(plan, is_ahead=is_ahead)
        value = runner._caches[0].values[0][runner._state._choices["hit/0"].blocks[0], :, 0]
        whole = value.clone()
        value.fill_(torch.nan)
        step = launch(plan, is_ahead=is_ahead)
        value.copy_(whole)
        return step

    monkeypatch.setattr(runner, "launch", spoiling)
    found = run(engine, requests)
    assert launches[2] == (("short/0", "hit/0", "beside/0"), True)
    assert launches[3] == (("hit/0", "beside/0"), True), "it was launched before the error was found"
    assert found["hit"] == (expected["hit"][0][:2], NOT_FINITE)
    assert [found[name] for name in ("short", "beside")] == [expected[name] for name in ("short", "beside")]
    again = [EngineRequest("again", (*PREFIX, *found["hit"][0]), DRAWN, 2)]
    assert run(engine, again) == run(new_engine(runner), again)
    assert engine.stats().prefix_hits == 0, "nobody finds the blocks of a choice that failed"


def new_engine(runner: ModelRunner) -> Engine:
    """With an empty prefix cache."""
    return Engine(Scheduler(SchedulerConfig(16, 8, 64, 64), runner.num_blocks), runner)


def run(engine: Engine, requests: list[EngineRequest]) -> dict[str, tuple[list[int], Failure | None]]:
    """Tokens and error of each request."""
    found: dict[str, tuple[list[int], Failure | None]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            tokens, _ = found.get(output.request_id, ([], None))
            found[output.request_id] = [*tokens, *output.tokens], output.error
        engine.check_integrity()
    return found
