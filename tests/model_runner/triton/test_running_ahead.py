"""Steps that are launched before the result of the one before: the same tokens, with graphs and without."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams, Speculation
from model_runner.done_at_launch import DoneAtLaunch
from model_runner.runner import ModelRunner
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.interface import EngineRequest
from scheduler.scheduler import Scheduler
from tests.model_runner.triton.interpreted_cuda import interpreted_runner

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, seed=5)
REQUESTS = [
    EngineRequest("greedy", (1, 17, 203, 5), GREEDY, 14),
    EngineRequest("drawn", (1, 8, 9, 10, 11, 12), DRAWN, 7),
    EngineRequest("stopped", (1, 17, 203, 5), replace(GREEDY, stop_token_ids=tuple(range(0, 320, 3))), 9),
    EngineRequest("speculating", (1, 4, 4, 4, 4, 4), DRAWN, 6, speculation=Speculation("suffix")),
]


class Waiting(DoneAtLaunch):
    """A runner whose steps are done when they are launched."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_blocks = runner.num_blocks

    def execute(self, plan):
        return self._runner.execute(plan)


def outputs(runner, requests: list[EngineRequest], late: EngineRequest | None = None) -> tuple[dict, int]:
    """Tokens by request, and how many steps were launched ahead; `late` comes when some steps were taken."""
    config = SchedulerConfig(16, 8, 64, 64, prefix_caching=False)
    engine = Engine(Scheduler(config, runner.num_blocks), runner)
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    num_ahead = num_steps = 0
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
        num_ahead += engine._ahead is not None
        num_steps += 1
        if num_steps == 5 and late is not None:
            engine.add(late)
        engine.check_integrity()
    return tokens, num_ahead


@pytest.mark.parametrize("graph_sizes", [(), (1, 2, 4, 8)])
def test_tokens_are_those_of_steps_one_after_the_other(
    tiny_model: Callable[[str], Path], graph_sizes: tuple[int, ...]
) -> None:
    config = RunnerConfig(tiny_model("llama"), dtype="float32", block_size=16, kv_cache_gib=0.005, max_model_len=64)
    runner, _ = interpreted_runner(config, graph_sizes)
    late = EngineRequest("late", (1, 99), replace(DRAWN, top_p=0.5), 3)
    expected, none = outputs(Waiting(runner), REQUESTS, late)
    tokens, num_ahead = outputs(runner, REQUESTS, late)
    assert tokens == expected
    assert none == 0
    assert num_ahead >= 3
    assert len(tokens["stopped"]) < 9, "it ends where nobody knew"
