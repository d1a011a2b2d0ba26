"""Steps that are launched before the result of the one before: the same tokens, with graphs and without."""

from dataclasses import replace
from pathlib import Path

from model_runner.contract import SamplingParams, Speculation
from model_runner.done_at_launch import DoneAtLaunch
from model_runner.runner import ModelRunner
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.interface import EngineRequest
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


class Waiting(DoneAtLaunch):
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


def test_tokens_are_those_of_steps_one_after_the_other(tmp_path: Path) -> None:
    runner = TinyEngines(tmp_path).cuda("llama", (1, 2, 4, 8)).runner
    expected, none = outputs(Waiting(runner))
    tokens, num_ahead = outputs(runner)
    assert tokens == expected
    assert none == 0
    assert num_ahead >= 3
    assert len(tokens["stopped"]) < 9, "it ends where nobody knew"
