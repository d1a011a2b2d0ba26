"""Nothing that a key has stored is another's: every path with an id in it, and what bodies can name."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from server.api.dialects import DIALECTS
from tests.server.batches.test_batches import Batches, written
from tests.server.helpers import COMPLETIONS, completion
from tests.server.tenants.keys import of_tenant

ROUTES = [
    (method, route.path)
    for dialect in DIALECTS
    for route in dialect.router.routes
    if isinstance(route, APIRoute) and "{" in route.path
    for method in sorted(route.methods)
]
SHARED = {"/v1/models/{model:path}", "/api/blobs/{digest}"}
"""Paths with names of what belongs to nobody."""
BODIES = {
    "/v1/conversations/{conversation_id}": {"metadata": {"taken": "over"}},
    "/v1/conversations/{conversation_id}/items": {"items": [{"role": "user", "content": "I was here"}]},
}
RESPONSE = {"model": "tiny", "input": "hi", "max_output_tokens": 16}


async def everything(client: httpx.AsyncClient) -> dict[str, str]:
    """One of each thing that is stored, by the name of its id in paths."""
    ids = {"request_id": (await client.post("/v1/responses", json=RESPONSE)).headers["x-request-id"]}
    response = (await client.post("/v1/responses", json={**RESPONSE, "background": True})).json()
    ids["response_id"] = response["id"]
    body = {"items": [{"role": "user", "content": "mine"}]}
    ids["conversation_id"] = (await client.post("/v1/conversations", json=body)).json()["id"]
    items = (await client.get(f"/v1/conversations/{ids['conversation_id']}/items")).json()
    ids["item_id"] = items["data"][0]["id"]
    batches = Batches(client)
    batch = await batches.ended((await batches.create(written([completion()])))["id"])
    ids["batch_id"], ids["file_id"] = batch["id"], batch["output_file_id"]
    return ids


async def told(client: httpx.AsyncClient, ids: dict[str, str]) -> list[Any]:
    """Everything that the owner of these objects can read."""
    paths = sorted({path for method, path in ROUTES if method == "GET" and path not in SHARED})
    return [(await client.get(path.format(**ids))).content for path in paths]


def anonymous(response: httpx.Response, ids: dict[str, str]) -> str:
    """An answer's text without the ids."""
    text = response.text
    for name, value in ids.items():
        text = text.replace(value, name)
    return text


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route[1] not in SHARED])
async def test_another_s_is_not_there(make_with_keys, tmp_path: Path, method: str, path: str) -> None:
    """To other keys, an object does not exist even if they know its id; and it is not changed."""
    app = make_with_keys({"ann": {}, "bob": {}}, data_dir=tmp_path / "data")
    async with of_tenant(app, "ann") as ann, of_tenant(app, "bob") as bob:
        ids = await everything(ann)
        missing = {name: re.sub("[0-9a-f]{6}$", "000000", value) for name, value in ids.items()}
        before = await told(ann, ids)
        body = BODIES.get(path) if method == "POST" else None
        there = await bob.request(method, path.format(**ids), json=body)
        nowhere = await bob.request(method, path.format(**missing), json=body)
        assert there.status_code == nowhere.status_code == 404
        assert anonymous(there, ids) == anonymous(nowhere, missing)
        assert await told(ann, ids) == before
        assert (await ann.request(method, path.format(**ids), json=body)).status_code != 404


async def test_bodies_cannot_name_another_s(make_with_keys, tmp_path: Path) -> None:
    app = make_with_keys({"ann": {}, "bob": {}}, data_dir=tmp_path / "data")
    async with of_tenant(app, "ann") as ann, of_tenant(app, "bob") as bob:
        ids = await everything(ann)
        whole = (await ann.post("/v1/responses", json=RESPONSE)).json()
        batch = {"input_file_id": ids["file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        named: list[tuple[str, dict[str, Any], int]] = [
            ("/v1/responses", {**RESPONSE, "previous_response_id": whole["id"]}, 400),
            ("/v1/responses", {**RESPONSE, "conversation": ids["conversation_id"]}, 404),
            ("/v1/responses", {**RESPONSE, "input": [{"type": "item_reference", "id": ids["item_id"]}]}, 404),
            ("/v1/batches", batch, 400),
        ]
        for path, body, status in named:
            assert (await bob.post(path, json=body)).status_code == status, body
        for path, body, _ in named[:3]:
            assert (await ann.post(path, json=body)).status_code == 200, body


async def test_lists_and_usage_are_of_one_s_own(make_with_keys, tmp_path: Path) -> None:
    app = make_with_keys({"ann": {}, "bob": {}}, data_dir=tmp_path / "data")
    async with of_tenant(app, "ann") as ann, of_tenant(app, "bob") as bob:
        await everything(ann)
        for path in ("/v1/files", "/v1/batches", "/v1/usage"):
            assert (await ann.get(path)).json()["data"], path
            assert (await bob.get(path)).json()["data"] == [], path
