"""Clients around the fake engine, in a process of its own."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams
from model_runner.processes import Backoff
from scheduler.interface import ChoiceState, EngineRequest, RequestOutput
from server.engine.messages import EngineConfig
from server.engine.process import EngineProcess, ProcessLink
from server.engine.supervisor import EngineLimits, EngineSupervisor
from tests.engine_process import fake_engine
from tests.engine_process.outputs import outputs_of

MAX_NUM_SEQS = 64
MAX_WAITING = 16
QUICK = Backoff(max_failures=3, first_s=0.01, longest_s=0.02)
LIMITS = EngineLimits(max_waiting=MAX_WAITING, engine_timeout_s=60.0, backoff=QUICK)

Make = Callable[..., EngineSupervisor]
Running = Callable[..., AbstractAsyncContextManager[EngineSupervisor]]


@pytest.fixture(autouse=True)
def worker_finds_the_repository(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A client that was not started. `loads` says how each start of the engine goes."""

    def build(loads: tuple[str, ...] = (), limits: EngineLimits = LIMITS) -> EngineSupervisor:
        (tmp_path / "loads").write_text("".join(f"{word}\n" for word in loads))
        config = EngineConfig(RunnerConfig(tmp_path, max_num_seqs=MAX_NUM_SEQS), log_level="critical")
        return EngineProcess(config, limits, open_link=partial(ProcessLink.open, fake_engine.__name__))

    return build


@pytest.fixture
def running(make: Make) -> Running:
    """A client that is ready, and is stopped afterwards."""

    @asynccontextmanager
    async def run(*args, **kwargs) -> AsyncIterator[EngineSupervisor]:
        client = make(*args, **kwargs)
        await client.start()
        try:
            await client.wait_ready()
            yield client
        finally:
            await client.stop()

    return run


def request(name: str, *prompt: int, max_tokens: int = 20, n: int = 1, seed: int = 0) -> EngineRequest:
    choices = tuple(ChoiceState(index) for index in range(n))
    return EngineRequest(name, prompt or (1, 2, 3), SamplingParams(seed=seed), max_tokens, choices)


async def collect(client: EngineSupervisor, wanted: EngineRequest) -> dict[int, tuple[int, ...]]:
    """The tokens of every choice. Raises what the stream raises."""
    return tokens_of([output async for output in outputs_of(client, wanted)])


def tokens_of(outputs: list[RequestOutput]) -> dict[int, tuple[int, ...]]:
    tokens: dict[int, tuple[int, ...]] = {}
    for output in outputs:
        tokens[output.choice] = tokens.get(output.choice, ()) + output.tokens
    return tokens
