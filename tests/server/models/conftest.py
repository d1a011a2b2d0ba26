"""A spare process with the fake engine's factory."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from model_runner.config import RunnerConfig
from server.engine.messages import EngineConfig, Plan
from server.engine.process import ProcessLink
from server.models.spare import SpareWorker
from tests.engine_process import fake_engine
from tests.engine_process.conftest import QUICK

OPEN = partial(ProcessLink.open, fake_engine.__name__, warm=True)


@pytest.fixture(autouse=True)
def worker_finds_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


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
