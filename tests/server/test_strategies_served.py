"""Contrastive search and best_of from the request to a real, tiny model and back."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_runner.config import RunnerConfig
from model_runner.hub.repository import ModelFolder
from server.api.body_worker import WorkerPool
from server.api.model_services import ModelParts
from server.app import create_app
from server.config import Settings
from server.engine import building
from server.engine.messages import EngineConfig
from server.engine.supervisor import EngineLimits
from server.text.tokenizer import Tokenizer
from tests.engine_process.inprocess import InProcessEngine
from tests.server.helpers import COMPLETIONS, client_of, completion, events_of


@pytest.fixture
async def served(
    tiny_model: Callable[[str], Path], folder: Path, tokenizer: Tokenizer, workers: WorkerPool
) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig(RunnerConfig(tiny_model("llama"), kv_cache_gib=0.02, max_num_seqs=16), log_level="critical")
    engine = InProcessEngine(partial(building.load, config), EngineLimits(max_waiting=16, engine_timeout_s=60.0))
    await engine.start()
    await engine.wait_ready()
    parts = ModelParts(engine, tokenizer, Settings(), ModelFolder(folder, "tiny"))
    app = create_app([parts], parts.settings, workers=workers)
    async with client_of(app) as client:
        yield client
    await engine.stop()


async def choices(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(COMPLETIONS, json=completion(max_tokens=12, return_token_ids=True, **fields))
    assert response.status_code == 200, response.text
    return response.json()["choices"]


async def test_both(served: httpx.AsyncClient) -> None:
    greedy, one, two, other = [
        (await choices(served, **fields))[0]
        for fields in (
            {"temperature": 0},
            {"penalty_alpha": 0.7, "logprobs": 1},
            {"penalty_alpha": 0.7, "top_k": 4},
            {"penalty_alpha": 0.7, "top_k": 8},
        )
    ]
    assert one["token_ids"] == two["token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in (greedy, one, other)}) == 3
    body = completion(max_tokens=12, penalty_alpha=0.7, stream=True)
    streamed = events_of((await served.post(COMPLETIONS, json=body)).text)
    assert "".join(event["choices"][0]["text"] for event in streamed) == one["text"]

    drawn = await choices(served, n=6, seed=3, logprobs=0)
    means = [sum(logprobs) / len(logprobs) for logprobs in (c["logprobs"]["token_logprobs"] for c in drawn)]
    best = sorted(range(6), key=lambda index: -means[index])[:2]
    found = await choices(served, n=2, best_of=6, seed=3)
    assert [choice["token_ids"] for choice in found] == [drawn[index]["token_ids"] for index in best]
    assert [choice["logprobs"] for choice in found] == [None, None]
