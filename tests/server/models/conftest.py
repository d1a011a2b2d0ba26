"""Models on fake engines, and a spare process with the fake engine's factory."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from model_runner.config import RunnerConfig
from server.api.body_worker import WorkerPool
from server.engine.messages import EngineConfig, Plan
from server.engine.process import ProcessLink
from server.models.spare import SpareWorker
from server.text.tokenizer import Tokenizer
from tests.engine_process import fake_engine
from tests.engine_process.conftest import QUICK
from tests.server.models.hosting import Hosting, host_of

ABC: Mapping[str, Mapping[str, Any]] = {"a": {"is_loaded_at_start": True}, "b": {"aliases": ["bee"]}, "c": {}}
OPEN = partial(ProcessLink.open, fake_engine.__name__, warm=True)


@pytest.fixture(autouse=True)
def worker_finds_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


@pytest.fixture
def hosting(folder: Path, tokenizer: Tokenizer, workers: WorkerPool) -> Iterator[Callable[..., Hosting]]:
    """Makes an application with models a (loaded at the start), b and c, of which two fit."""
    made: list[Hosting] = []

    def make(models: Mapping[str, Mapping[str, Any]] = ABC, room: int = 2, **settings: Any) -> Hosting:
        made.append(host_of(folder, tokenizer, workers, models, room, **settings))
        return made[-1]

    yield make
    for one in made:
        one.app.state.services.storage.close()


@pytest.fixture
async def spare() -> AsyncIterator[SpareWorker]:
    """A spare that was not asked to wait yet."""
    made = SpareWorker(OPEN, QUICK)
    yield made
    await made.close()


@pytest.fixture
def plan_of(tmp_path: Path) -> Callable[..., Plan]:
    """A plan of a model whose name says what planning does."""

    def make(name: str, budget: int | None = None) -> Plan:
        return Plan(
            EngineConfig(RunnerConfig(tmp_path / name), log_level="critical"), {} if budget is None else {"cpu": budget}
        )

    return make
