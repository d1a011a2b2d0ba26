"""Places in the queue, from requests with keys to a supervised engine."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from fastapi import FastAPI

from model_runner.config import RunnerConfig
from model_runner.hub.repository import ModelFolder
from server.api.body_worker import WorkerPool
from server.api.model_services import ModelParts
from server.app import create_app
from server.config import Settings
from server.engine.messages import EngineConfig
from server.engine.supervisor import EngineLimits
from server.text.tokenizer import Tokenizer
from tests.engine_process import fake_engine
from tests.engine_process.inprocess import InProcessEngine
from tests.server.helpers import COMPLETIONS, completion
from tests.server.tenants.keys import of_tenant, write_keys
from tests.waiting import until

NUM_SEQS, WAITING = 64, 16
"""All places are held by one request with 8 prompts of 10 answers each."""


@pytest.fixture
async def app(folder: Path, tokenizer: Tokenizer, tmp_path: Path, workers: WorkerPool) -> AsyncIterator[FastAPI]:
    config = EngineConfig(RunnerConfig(tmp_path, max_num_seqs=NUM_SEQS), log_level="critical")
    limits = EngineLimits(max_waiting=WAITING, engine_timeout_s=60.0)
    engine = InProcessEngine(partial(fake_engine.load, config), limits)
    settings = Settings(
        api_keys_file=write_keys(tmp_path / "keys.yaml", ann={}, bob={}), policy="fair", max_waiting=WAITING
    )
    await engine.start()
    await engine.wait_ready()
    made = create_app([ModelParts(engine, tokenizer, settings, ModelFolder(folder, "tiny"))], settings, workers=workers)
    yield made
    await engine.stop()
    made.state.services.storage.close()


@pytest.mark.parametrize(("other", "status"), [("bob", 200), ("ann", 429)])
async def test_one_request_keeps_no_other_key_out(app: FastAPI, other: str, status: int) -> None:
    async with of_tenant(app, "ann") as ann, of_tenant(app, other) as client:
        body = completion(prompt=["x"] * 8, n=10, max_tokens=900, ignore_eos=True)
        filling = asyncio.create_task(ann.post(COMPLETIONS, json=body))
        engine = app.state.services.models.default.engine
        await until(lambda: engine.stats.num_running == NUM_SEQS + WAITING)
        answers = await asyncio.gather(*(client.post(COMPLETIONS, json=completion(max_tokens=2)) for _ in range(12)))
        assert {answer.status_code for answer in answers} == {status}
        assert not filling.done()
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
