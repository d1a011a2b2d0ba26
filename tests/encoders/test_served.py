"""Encoders behind the API, on real engines."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from bench.random_encoders import TEXTS, add_modules, dense, pooling, save_encoder
from model_runner.hub.repository import ModelFolder
from server.api.body_worker import WorkerPool
from server.api.model_services import ModelParts
from server.app import create_app
from server.assembly import Checkpoints, engine_config, make_engine
from server.config import Settings
from server.engine import building
from server.engine.supervisor import EngineLimits, EngineSupervisor
from server.text import tokenizer as texts
from tests.encoders.oracle import Oracle, cosine
from tests.engine_process.inprocess import InProcessEngine
from tests.server.helpers import client_of, error_of

Serve = Callable[..., Any]


@pytest.fixture
def serve(workers: WorkerPool) -> Serve:
    """A context manager that serves a folder, and gives clients of it and its engine."""

    @asynccontextmanager
    async def served(
        folder: Path, *, in_process: bool = True
    ) -> AsyncIterator[tuple[openai.AsyncOpenAI, httpx.AsyncClient, Any]]:
        settings = Settings(model=str(folder), quantization="none", threads=1, speculation="off")
        found = ModelFolder(folder, "tiny")
        checkpoints = Checkpoints(found, None, ())
        engine: EngineSupervisor = make_engine(settings, checkpoints)
        if in_process:
            config = engine_config(settings, checkpoints)
            engine = InProcessEngine(partial(building.load, config), EngineLimits(64, 60))
        app = create_app(
            [ModelParts(engine, texts.Tokenizer.from_folder(folder), settings, found)], settings, workers=workers
        )
        await engine.start()
        try:
            await engine.wait_ready()
            async with client_of(app) as http:
                yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http), http, engine
        finally:
            await engine.stop()
            app.state.services.storage.close()

    return served


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_encoder(tmp_path_factory.mktemp("served") / "bert", "bert")
    prompts = {"prompts": {"query": "ask ", "document": ""}, "default_prompt_name": None}
    return add_modules(folder, pooling("cls", "mean"), dense(96, 24), ("Normalize", {}), **prompts)


async def test_embeddings(serve: Serve, embedder: Path) -> None:
    made, oracle = Tokenizer.from_file(str(embedder / "tokenizer.json")), Oracle(embedder)
    async with serve(embedder, in_process=False) as (client, http, engine):
        crowd = await client.embeddings.create(model="tiny", input=TEXTS)
        alone = [(await client.embeddings.create(model="tiny", input=text)).data[0].embedding for text in TEXTS]
        assert [one.embedding for one in crowd.data] == alone
        for text, numbers in zip(TEXTS, alone, strict=True):
            assert cosine(np.array(numbers), oracle.embed(made.encode(text).ids)) > 1 - 1e-9
        assert crowd.usage.prompt_tokens == sum(len(made.encode(text).ids) for text in TEXTS)

        query = await client.embeddings.create(model="tiny", input=TEXTS[0], extra_body={"prompt_name": "query"})
        assert cosine(np.array(query.data[0].embedding), oracle.embed(made.encode(f"ask {TEXTS[0]}").ids)) > 1 - 1e-9
        assert query.data[0].embedding != alone[0]

        many = await asyncio.gather(
            *(client.embeddings.create(model="tiny", input=TEXTS[index % 5]) for index in range(40))
        )
        assert [answer.data[0].embedding for answer in many] == [alone[index % 5] for index in range(40)]

        await _check_lengths(client, http)
        await _check_other_endpoints(http)
        os.kill(engine.pid, signal.SIGKILL)
        again = await client.with_options(max_retries=20).embeddings.create(model="tiny", input=TEXTS)
        assert [one.embedding for one in again.data] == alone


async def _check_lengths(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    long = "word " * 70
    refused = await http.post("/v1/embeddings", json={"model": "tiny", "input": long})
    assert error_of(refused, 400)["code"] == "context_length_exceeded"
    assert "maximum context length is 200 tokens" in refused.json()["error"]["message"]
    fitting = await client.embeddings.create(model="tiny", input=long, extra_body={"truncate_prompt_tokens": -1})
    assert fitting.usage.prompt_tokens == 200
    short = {"truncate_prompt_tokens": 6}
    cut = await client.embeddings.create(model="tiny", input=long, extra_body=short)
    assert cut.data[0].embedding == (await client.embeddings.create(model="tiny", input="word")).data[0].embedding
    for body, code in (
        ({"input": long, "truncate_prompt_tokens": 2}, "integer_below_min_value"),
        ({"input": [4, 5, 6], **short}, "invalid_parameter_combination"),
        ({"input": "a", "dimensions": 5}, "unsupported_parameter"),
        ({"input": "a", "prompt_name": "other"}, "invalid_value"),
        ({"messages": [{"role": "user", "content": "a"}]}, "unsupported_parameter"),
    ):
        assert error_of(await http.post("/v1/embeddings", json={"model": "tiny", **body}), 400)["code"] == code


async def _check_other_endpoints(http: httpx.AsyncClient) -> None:
    message = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": message}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": message, "max_tokens": 5}),
        ("/completion", {"prompt": "a"}),
    ):
        answer = await http.post(path, json={"model": "tiny", **body})
        assert answer.status_code == 400, path
        assert "cannot generate text. It can embed (/v1/embeddings)." in answer.json()["error"]["message"], path
    scores = await http.post("/v1/score", json={"model": "tiny", "queries": "a", "documents": "b"})
    assert error_of(scores, 400)["code"] == "unsupported_model"
    capabilities = (await http.get("/v1/capabilities")).json()
    assert (capabilities["generates"], capabilities["max_model_len"]) == (False, 200)
    assert capabilities["embedding"] == {
        "trained": True,
        "pooling": "cls+mean",
        "normalized": True,
        "size": 24,
        "dimensions": None,
        "prompts": ["document", "query"],
        "default_prompt": None,
        "similarity": "cosine",
    }
    assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == 200
    assert (await http.post("/tokenize", json={"model": "tiny", "prompt": "ab"})).json()["count"] == 4
    assert (await http.get("/health")).status_code == 200
    metrics = (await http.get("/metrics")).text
    assert "samewise:prompt_tokens_total" in metrics
    assert "samewise:kv_cache_blocks{" not in metrics
    assert (await http.get("/v1/steps")).json()["kv_cache"] is None


async def test_scores_and_rankings(serve: Serve, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "reranker", "bert", classes=1)
    oracle, made = Oracle(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = ["a lazy dog", "b", "zebra quiz", "the quick brown fox jumps"]
    raw = [_score(oracle, made, "what dog", document) for document in documents]
    async with serve(folder) as (_, http, _):
        body = {"model": "tiny", "query": "what dog", "documents": documents}
        ranked = (await http.post("/v1/rerank", json=body)).json()["results"]
        assert [one["index"] for one in ranked] == sorted(range(4), key=lambda index: -raw[index])
        for one in ranked:
            assert one["relevance_score"] == pytest.approx(1 / (1 + np.exp(-raw[one["index"]])), abs=1e-5)
        scored = await http.post(
            "/v1/score",
            json={"model": "tiny", "queries": "what dog", "documents": documents, "use_activation": False},
        )
        assert [one["score"] for one in scored.json()["data"]] == pytest.approx(raw, abs=1e-4)
        alone = [
            (await http.post("/v1/score", json={"queries": "what dog", "documents": document})).json()["data"][0]
            for document in documents
        ]
        by_index = {one["index"]: one["relevance_score"] for one in ranked}
        assert [one["score"] for one in alone] == [by_index[index] for index in range(4)]
        refused = await http.post("/v1/embeddings", json={"model": "tiny", "input": "a"})
        assert error_of(refused, 400)["code"] == "unsupported_model"


def _score(oracle: Oracle, made: Tokenizer, query: str, document: str) -> float:
    encoded = made.encode(query, document)
    return float(oracle.classify(encoded.ids, encoded.type_ids)[0])


async def test_classes(serve: Serve, tmp_path: Path) -> None:
    names = {"id2label": {0: "sad", 1: "glad", 2: "mad"}}
    folder = save_encoder(tmp_path / "classifier", "distilbert", classes=3, **names)
    oracle, made = Oracle(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    async with serve(folder) as (_, http, _):
        answer = (await http.post("/v1/classify", json={"model": "tiny", "input": TEXTS})).json()
        raw = (await http.post("/v1/classify", json={"input": TEXTS, "use_activation": False})).json()
        for text, one, numbers in zip(TEXTS, answer["data"], raw["data"], strict=True):
            encoded = made.encode(text)
            logits = oracle.classify(encoded.ids, encoded.type_ids)
            assert numbers["probs"] == pytest.approx(logits.tolist(), abs=1e-4)
            expected = np.exp(logits) / np.exp(logits).sum()
            assert one["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
            assert one["label"] == names["id2label"][int(logits.argmax())]
            assert one["num_classes"] == 3
        assert answer["usage"]["prompt_tokens"] == sum(len(made.encode(text).ids) for text in TEXTS)
        assert (await http.post("/invocations", json={"input": TEXTS})).json()["data"] == answer["data"]
        refused = await http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
        assert "3 classes; scoring needs one" in error_of(refused, 400)["message"]
        capability = (await http.get("/v1/capabilities")).json()["classification"]
        assert capability == {"labels": ["sad", "glad", "mad"], "exclusive": True}
