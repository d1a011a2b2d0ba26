"""Applications on real, tiny engines in this process."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_runner.config import RunnerConfig
from model_runner.hub.repository import ModelFolder
from model_runner.processes import Backoff
from server.api.body_worker import WorkerPool
from server.api.model_services import ModelParts
from server.app import create_app
from server.config import Settings
from server.engine import building
from server.engine.loop import LoadedEngine
from server.engine.messages import EngineConfig
from server.engine.supervisor import EngineLimits
from server.text.tokenizer import Tokenizer
from tests.engine_process import fake_engine
from tests.engine_process.inprocess import InProcessEngine
from tests.server.helpers import client_of

Served = tuple[httpx.AsyncClient, InProcessEngine]
Serve = Callable[..., AbstractAsyncContextManager[Served]]


def _serve(folder: Path, tokenizer: Tokenizer, workers: WorkerPool, load: Callable[[], LoadedEngine], **settings: Any):
    @asynccontextmanager
    async def served() -> AsyncIterator[Served]:
        limits = EngineLimits(max_waiting=16, engine_timeout_s=60.0, backoff=Backoff(first_s=0.01, longest_s=0.02))
        engine = InProcessEngine(load, limits)
        await engine.start()
        try:
            await engine.wait_ready()
            parts = ModelParts(engine, tokenizer, Settings(**settings), ModelFolder(folder, "tiny"))
            app = create_app([parts], parts.settings, workers=workers)
            async with app.router.lifespan_context(app), client_of(app) as client:
                yield client, engine
        finally:
            await engine.stop()

    return served()


@pytest.fixture
def with_model(tiny_model: Callable[[str], Path], folder: Path, tokenizer: Tokenizer, workers: WorkerPool) -> Serve:
    """A tiny model in blocks of 16 tokens; `gib` is the memory for them."""

    def serve(gib: float = 0.01, chunk: int = 64, **settings: Any) -> AbstractAsyncContextManager[Served]:
        sizes = {"block_size": 16, "max_num_seqs": 16, "max_model_len": 64, "max_num_batched_tokens": chunk}
        config = RunnerConfig(tiny_model("llama"), kv_cache_gib=gib, speculation="off", **sizes)
        load = partial(building.load, EngineConfig(config, log_level="critical"))
        return _serve(folder, tokenizer, workers, load, **settings)

    return serve


@pytest.fixture
def with_scripted(folder: Path, tokenizer: Tokenizer, workers: WorkerPool, tmp_path: Path) -> Serve:
    """An engine of a few milliseconds a step that breaks where a prompt tells it to."""
    config = EngineConfig(RunnerConfig(tmp_path), log_level="critical")
    return lambda **settings: _serve(folder, tokenizer, workers, partial(fake_engine.load, config), **settings)
