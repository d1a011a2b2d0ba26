"""GET /v1/requests: the key's own requests, newest first, each equal to its single record."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.fake_engine import FakeEngine
from tests.server.helpers import COMPLETIONS, completion, error_of
from tests.server.requests.conftest import Serve
from tests.server.requests.test_explaining import LONG, ended, told, when
from tests.server.tenants.keys import of_tenant
from tests.server.test_timelines import Scene


async def listed(client: httpx.AsyncClient, **query: Any) -> dict[str, Any]:
    response = await client.get("/v1/requests", params=query)
    assert response.status_code == 200, response.text
    page = response.json()
    assert page["object"] == "list"
    ids = [one["id"] for one in page["data"]]
    assert [page["first_id"], page["last_id"]] == ([ids[0], ids[-1]] if ids else [None, None])
    return page


async def sent(client: httpx.AsyncClient, *names: str) -> None:
    """Requests with these ids, one after the other."""
    for name in names:
        response = await client.post(COMPLETIONS, json=completion(), headers={"x-request-id": name})
        await ended(client, response.json()["id"])


def ids(page: dict[str, Any]) -> list[str]:
    return [one["id"] for one in page["data"]]


async def test_each_is_told_as_by_itself(client: httpx.AsyncClient) -> None:
    assert await listed(client) == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    await sent(client, "a", "b", "c")
    page = await listed(client)
    assert ids(page) == ["c", "b", "a"]
    assert page["data"] == [await told(client, name) for name in "cba"]
    assert not page["has_more"]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 5, 100])
async def test_pages_have_each_once(client: httpx.AsyncClient, order: str, limit: int) -> None:
    names = [f"r{index}" for index in range(5)]
    await sent(client, *names)
    found: list[str] = []
    query: dict[str, Any] = {"order": order, "limit": limit}
    while True:
        page = await listed(client, **query)
        found += ids(page)
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert found == (names if order == "asc" else names[::-1])


async def test_a_page_is_behind_all_of_one_id(client: httpx.AsyncClient) -> None:
    """So that paging ends; each request is also found by its answer's id."""
    await sent(client, "first", "same", "same", "same")
    assert ids(await listed(client, limit=1)) == ["same"]
    assert ids(await listed(client, limit=1, after="same")) == ["first"]
    second = (await listed(client))["data"][1]["answer_id"]
    assert ids(await listed(client, after=second)) == ["same", "first"]


async def test_twenty_unless_it_is_said(client: httpx.AsyncClient) -> None:
    await sent(client, *(f"r{index}" for index in range(21)))
    page = await listed(client)
    assert (len(page["data"]), page["has_more"]) == (20, True)


async def test_what_runs_is_told_as_far_as_it_is_known_here(with_scripted: Serve) -> None:
    async with with_scripted() as (client, _):
        await sent(client, "over")
        body = completion(prompt=[1, 2, 3], max_tokens=LONG, ignore_eos=True, n=2)
        task = asyncio.create_task(client.post(COMPLETIONS, json=body, headers={"x-request-id": "mine"}))
        await when(client, "mine", lambda one: one["output_tokens"] > 0)
        page = await listed(client)
        assert ids(page) == ["mine", "over"]
        mine = page["data"][0]
        assert (mine["state"], mine["status"], mine["num_choices"]) == ("running", None, 2)
        assert 0 < mine["output_tokens"] <= (await told(client, "mine"))["output_tokens"]
        assert 0 < mine["time_to_first_token_ms"] < mine["times_ms"]["total"]
        assert [choice["state"] for choice in mine["choices"]] == ["unknown", "unknown"]
        task.cancel()
        await asyncio.wait([task])
        assert (await ended(client, "mine")) == (await listed(client))["data"][0]


async def test_one_key_sees_nothing_of_another(make_with_keys: Callable[..., FastAPI]) -> None:
    app = make_with_keys({"ann": {}, "bob": {}})
    async with of_tenant(app, "ann") as ann, of_tenant(app, "bob") as bob:
        await sent(ann, "hers")
        await sent(bob, "his")
        assert [ids(await listed(client)) for client in (ann, bob)] == [["hers"], ["his"]]
        assert "hers" in error_of(await bob.get("/v1/requests", params={"after": "hers"}))["message"]
        del bob.headers["authorization"]
        error_of(await bob.get("/v1/requests"), 401)


def test_lines_of_batches_are_left_out() -> None:
    scene = Scene()
    scene.end("line", is_background=True)
    scene.begin("running line", is_background=True)
    scene.end("other", client="bob")
    scene.begin("running")
    scene.end("over")
    assert [one.request_id for one in scene.timelines.of_client("")] == ["running", "over"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"order": "newest"}, "order"),
        ({"after": "nobody"}, "after"),
        ({"before": "a"}, "before"),
    ],
)
async def test_what_no_list_takes_is_refused(client: httpx.AsyncClient, query: dict[str, Any], param: str) -> None:
    await sent(client, "a")
    assert error_of(await client.get("/v1/requests", params=query))["param"] == param


async def test_what_the_engine_did_not_take_is_not_listed(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(COMPLETIONS, json=completion(max_tokens=0.5))
    assert (await listed(client))["data"] == []
    assert engine.requests == []
