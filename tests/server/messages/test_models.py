"""The list of models in the form of the one who asks."""

from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from anthropic.types import ModelInfo
from fastapi import FastAPI

from tests.server.helpers import client_of
from tests.server.messages.reading import error_of

NAMES = ["tiny", "org/b", "c", "d"]
HEADERS = {"anthropic-version": "2023-06-01"}


@pytest.fixture
async def client(make_app: Callable[..., FastAPI]) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app(served_model_name=",".join(NAMES))) as client:
        yield client


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ("", NAMES, False),
        ("?limit=1000&beta=true", NAMES, False),
        ("?limit=2", ["tiny", "org/b"], True),
        ("?limit=2&after_id=org/b", ["c", "d"], False),
        ("?limit=1&after_id=org/b", ["c"], True),
        ("?limit=2&before_id=d", ["org/b", "c"], True),
        ("?before_id=c", ["tiny", "org/b"], False),
        ("?after_id=d", [], False),
    ],
)
async def test_pages(client: httpx.AsyncClient, query: str, names: list[str], has_more: bool):
    page = (await client.get(f"/v1/models{query}", headers=HEADERS)).json()
    assert [ModelInfo.model_validate(model).id for model in page["data"]] == names
    assert page["has_more"] == has_more
    assert (page["first_id"], page["last_id"]) == ((names[0], names[-1]) if names else (None, None))
    assert (await client.get(f"/v1/models{query}")).json()["object"] == "list"


async def test_one(client: httpx.AsyncClient):
    model = (await client.get("/v1/models/org/b", headers=HEADERS)).json()
    ModelInfo.model_validate(model)
    assert (model["type"], model["id"], model["max_input_tokens"]) == ("model", "org/b", 4096)
    error_of(await client.get("/v1/models/x", headers=HEADERS), 404, "not_found_error")
    assert (await client.get("/v1/models/x")).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=1001", "after_id=x", "before_id=c&after_id=c"])
async def test_bad_queries(client: httpx.AsyncClient, query: str):
    error_of(await client.get(f"/v1/models?{query}", headers=HEADERS))
