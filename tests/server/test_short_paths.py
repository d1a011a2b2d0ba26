"""Paths without /v1: the same routes, for clients whose base URL lacks it."""

import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from openai import OpenAI

from server.api.dialect import Dialect
from server.api.dialects import DIALECTS, short_paths
from server.http.middleware import ShortPaths
from tests.server.helpers import chat, client_of, completion, error_of

ASKED: dict[str, dict[str, Any]] = {
    "/chat/completions": chat(seed=1),
    "/completions": completion(seed=1),
    "/messages": chat(seed=1),
    "/messages/count_tokens": {"model": "tiny", "messages": chat()["messages"]},
    "/responses": {"model": "tiny", "input": "hi", "max_output_tokens": 16, "seed": 1},
    "/responses/input_tokens": {"model": "tiny", "input": "hi"},
    "/embeddings": {"model": "tiny", "input": "hi"},
}


def without_ids(answer: httpx.Response) -> dict[str, Any]:
    """The part of an answer that is equal for the same request."""
    return {key: value for key, value in answer.json().items() if key not in ("id", "created", "created_at", "output")}


@pytest.mark.parametrize("path", ASKED)
async def test_a_short_path_is_answered_as_the_full_one(client: httpx.AsyncClient, path: str):
    short, full = [await client.post(prefix + path, json=ASKED[path]) for prefix in ("", "/v1")]
    assert (short.status_code, full.status_code) == (200, 200), short.text
    assert without_ids(short) == without_ids(full)


@pytest.mark.parametrize("path", ["/models", "/models/tiny", "/capabilities", "/requests"])
async def test_so_are_those_that_are_read(client: httpx.AsyncClient, path: str):
    assert (await client.get(path)).json() == (await client.get(f"/v1{path}")).json()


def test_the_official_clients_need_no_v1(address: str):
    with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        assert client.models.list().data[0].id == "tiny"
        assert client.chat.completions.create(**chat()).choices[0].message.content
        stored = client.responses.create(model="tiny", input="hi")
        assert client.responses.retrieve(stored.id).id == stored.id


async def test_keys_errors_logs_and_metrics_know_the_full_path(
    make_app: Callable[..., FastAPI], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    async with client_of(make_app(api_key="main-key")) as client:
        assert (await client.get("/models")).status_code == 401
        client.headers["x-api-key"] = "main-key"
        assert (await client.get("/models")).status_code == 200
        refused = await client.post("/messages", json={})
        assert refused.json()["type"] == "error", "in Anthropic's form"
        metrics = (await client.get("/metrics")).text
    for line in ('handler="/v1/models",method="GET",status="200"', 'handler="/v1/messages",method="POST",status="400"'):
        assert line in metrics
    assert {"/v1/models", "/v1/messages"} <= {getattr(record, "route", "") for record in caplog.records}


async def test_the_document_has_every_route_once(client: httpx.AsyncClient):
    document = (await client.get("/openapi.json")).json()
    paths = set(document["paths"])
    assert not {path.removeprefix("/v1") for path in paths if path.startswith("/v1/")} & paths
    endpoints = (await client.get("/v1/capabilities")).json()["endpoints"]
    assert "/chat/completions" not in json.dumps([*paths, *endpoints]).replace("/v1/chat/completions", "")


@pytest.mark.parametrize(
    "path", ["/", "", "*", "/v1", "/v1/models", "/v1/v1/models", "//models", "/health", "/nowhere"]
)
def test_other_paths_stay_as_they_are(path: str):
    assert short_paths(DIALECTS).full(path) == path


async def test_a_path_of_the_api_s_own_wins(make_app: Callable[..., FastAPI]):
    """A dialect may have a route that is another one's short path."""
    router = APIRouter()

    @router.get("/models")
    async def own() -> str:
        return "own"

    async with client_of(make_app(dialects=(*DIALECTS, Dialect(router)))) as client:
        assert (await client.get("/models")).json() == "own"
        assert (await client.get("/v1/models")).json()["object"] == "list"
        error_of(await client.get("/models/tiny"), 404)


def test_segments_are_compared_as_a_whole():
    paths = ShortPaths(["/v1/completions", "/v1/chat/completions", "/completion"])
    assert paths.full("/completion") == "/completion"
    assert paths.full("/completions") == "/v1/completions"
    assert paths.full("/chats") == "/chats"
    assert paths.full("/chat/x") == "/v1/chat/x"
