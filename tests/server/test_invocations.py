"""POST /invocations: each body is answered by the API whose form it has."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.api import body_worker
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, error_of, events_of, refused
from tests.server.tenants.keys import bearer
from tests.server.test_embeddings import TRAINED, asked, folder_with

PATH = "/invocations"
PAIRS: dict[str, Any] = {"model": "tiny", "documents": ["a", "b"]}
FORMS = [
    (CHAT, chat(seed=1, logprobs=True)),
    (COMPLETIONS, completion(seed=1)),
    ("/v1/embeddings", asked(input=["a", "b"])),
    ("/v1/rerank", {**PAIRS, "query": "q"}),
    ("/v1/score", {**PAIRS, "queries": "q"}),
    ("/v1/score", {"text_1": "q", "text_2": ["a", "b"]}),
]


@pytest.fixture
async def able(make_app: Callable[..., FastAPI], engine: FakeEngine):
    """A model that writes, embeds and scores."""
    engine.info_ = replace(engine.info_, max_model_len=512)
    async with client_of(make_app(score_tokens=("n", "y"))) as client:
        yield client


def without_ids(answer: httpx.Response) -> dict[str, Any]:
    return {key: value for key, value in answer.json().items() if key not in ("id", "created")}


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_a_body_is_answered_as_at_the_path_of_its_api(able: httpx.AsyncClient, path: str, body: dict[str, Any]):
    invoked, own = [await able.post(one, json=body) for one in (PATH, path)]
    assert (invoked.status_code, own.status_code) == (200, 200), invoked.text
    assert without_ids(invoked) == without_ids(own)
    assert [name for name in invoked.headers if name != "x-request-id"] == [
        name for name in own.headers if name != "x-request-id"
    ]


async def test_it_streams(able: httpx.AsyncClient):
    texts = []
    for path in (PATH, CHAT):
        answer = await able.post(path, json=chat(seed=1, stream=True))
        assert answer.headers["content-type"].startswith("text/event-stream")
        texts.append([chunk["choices"][0]["delta"].get("content") for chunk in events_of(answer.text)])
    assert texts[0] == texts[1]


async def test_what_is_left_out_is_reported(able: httpx.AsyncClient):
    invoked = await able.post(PATH, json=chat(store=True))
    assert invoked.headers["x-samewise-ignored"] == "store"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, None, "missing_required_parameter"),
        ({"model": "tiny"}, None, "missing_required_parameter"),
        ({"messages": None, "prompt": None}, None, "missing_required_parameter"),
        ([1], None, "missing_required_parameter"),
        (chat(temperatur=1), "temperatur", "unknown_parameter"),
        (chat(prompt="a"), "prompt", "unknown_parameter"),
        ({**PAIRS, "query": 1}, "query", "invalid_type"),
    ],
)
async def test_what_has_no_form_or_a_wrong_one_is_refused(able: httpx.AsyncClient, body: Any, param: str, code: str):
    await refused(able, PATH, body, param, code)


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"prompt": "a", "prompt": "b", "model": "tiny"}', b"[" * 100_000, b"\xff"]
)
async def test_what_is_no_json_is_refused_as_anywhere(able: httpx.AsyncClient, content: bytes):
    error = error_of(await able.post(PATH, content=content, headers={"content-type": "application/json"}))
    assert "JSON" in error["message"] or "UTF-8" in error["message"]


async def test_a_model_that_does_not_write_makes_vectors_of_messages(
    make_app: Callable[..., FastAPI], tmp_path: Path, engine: FakeEngine
):
    folder = folder_with(tmp_path / "model", {**TRAINED, "config.json": {"architectures": ["LlamaModel"]}})
    async with client_of(make_app(folder)) as client:
        body = {"model": "tiny", "messages": chat()["messages"]}
        invoked, own = [await client.post(path, json=body) for path in (PATH, "/v1/embeddings")]
        assert invoked.json() == own.json()
        assert invoked.json()["object"] == "list"


async def test_large_bodies_are_read_elsewhere_and_keys_count_their_tokens(
    make_with_keys: Callable[..., FastAPI], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(body_worker, "LARGE_BYTES", 100)
    monkeypatch.setattr(body_worker, "SMALL_BYTES", 50)
    app = make_with_keys({"a": {"requests_per_minute": 1}})
    async with client_of(app) as client:
        answer = await client.post(PATH, json=chat(), headers=bearer("a"))
        assert answer.status_code == 200
        assert answer.json()["object"] == "chat.completion"
        assert (await client.post(PATH, json=chat(), headers=bearer("a"))).status_code == 429
        assert (await client.post(PATH, json=chat())).status_code == 401
    assert len(engine.requests) == 1


async def test_the_document_says_which_forms_there_are(client: httpx.AsyncClient):
    document = (await client.get("/openapi.json")).json()
    schema = document["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    named = [one["$ref"].rpartition("/")[2] for one in schema["anyOf"]]
    pooling = ["EmbeddingRequest", "RerankRequest", "ScoreRequest", "ClassifyRequest"]
    assert named == ["ChatCompletionRequest", "CompletionRequest", *pooling]
    assert set(named) <= set(document["components"]["schemas"])
