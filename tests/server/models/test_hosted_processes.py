"""Models of a host whose engines are processes, and what happens to the others when one of these is killed."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from model_runner.config import RunnerConfig
from server.engine.messages import EngineConfig
from server.engine.process import EngineProcess
from server.errors import UnavailableError
from server.models.host import ModelHost
from server.models.hosted_model import HostedModel, Phase, Residency
from server.models.ledger import Ledgers
from server.models.source import ProcessSource
from server.models.spare import SpareWorker
from tests.engine_process.conftest import LIMITS, collect, request
from tests.engine_process.fake_engine import expected
from tests.waiting import until

Hosted = tuple[ModelHost, dict[str, HostedModel]]


@pytest.fixture
async def hosted(spare: SpareWorker, tmp_path: Path) -> AsyncIterator[Hosted]:
    """A host of two models that fit together."""
    ledgers = Ledgers(1 << 40)
    host = ModelHost(ledgers, spare)
    models = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        config = EngineConfig(RunnerConfig(tmp_path / name), log_level="critical")
        models[name] = host.add(name, ProcessSource(config, LIMITS, spare, ledgers, None), Residency())
    await host.start()
    yield host, models
    await host.stop()


def pid_of(model: HostedModel) -> int:
    pid = cast(EngineProcess, model.engine).pid
    assert pid is not None
    return pid


async def test_killing_one_engine_leaves_all_streams_whole(hosted: Hosted) -> None:
    _, models = hosted
    wanted = {name: request(name, max_tokens=400) for name in models}
    async with models["one"].use(0, is_background=False), models["two"].use(0, is_background=False):
        streams = [asyncio.create_task(collect(models[name], one)) for name, one in wanted.items()]
        await until(lambda: all(model.stats.steps > 3 for model in models.values()))
        os.kill(pid_of(models["one"]), signal.SIGKILL)
        assert await asyncio.gather(*streams) == [{0: expected(one)} for one in wanted.values()]
    assert [models[name].num_restarts for name in ("one", "two")] == [1, 0]


async def test_killing_a_model_that_loads_fails_its_requests_alone(
    hosted: Hosted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, models = hosted
    (tmp_path / "two" / "loads").write_text("forever\n")
    wanted = request("one", max_tokens=400)
    async with models["one"].use(0, is_background=False):
        stream = asyncio.create_task(collect(models["one"], wanted))
        waiting = asyncio.create_task(_use(models["two"]))
        await until(lambda: models["two"].engine is not None and cast(EngineProcess, models["two"].engine).pid)
        pid = pid_of(models["two"])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"`two` is not available: .* log says why") as refused:
            await waiting
        assert str(pid) not in str(refused.value)
        assert f"two cannot be loaded: The engine did not start: process {pid} was killed by SIGKILL" in caplog.text
        assert await stream == {0: expected(wanted)}
    assert models["two"].phase is Phase.UNLOADED


async def _use(model: HostedModel) -> None:
    async with model.use(0, is_background=False):
        pass
