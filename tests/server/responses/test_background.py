"""Responses in the background: made without their clients, followed, cancelled, and made after a restart."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.app import _lifespan
from server.engine.client import EngineUnavailableError, QueueFullError, RequestFailedError
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import client_of, error_of, says
from tests.server.responses.calling import RESPONSES, asking, events_of, kinds_of, text_of, whole
from tests.server.responses.test_answers import ADDED, DONE, TEXT

QUEUED = ["created", "queued", "in_progress"]


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, which starts and ends as a server does."""
    async with _lifespan(app), client_of(app) as client:
        yield client


async def begun(client: httpx.AsyncClient, **fields: Any) -> str:
    """The path of a response in the background."""
    response = await whole(client, background=True, **fields)
    assert (response["status"], response["output"], response["background"]) == ("queued", [], True)
    return f"{RESPONSES}/{response['id']}"


async def ended(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """The response when it has ended: its stream says when."""
    last = events_of((await client.get(f"{path}?stream=true")).text)[-1]["response"]
    response = (await client.get(path)).json()
    assert response == last
    return response


async def test_it_is_made_without_its_client(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says("Done.")
    response = await ended(client, await begun(client))
    assert (response["status"], text_of(response)) == ("completed", "Done.")


async def test_it_comes_out_as_in_the_foreground(client: httpx.AsyncClient) -> None:
    fields = {"seed": 5, "max_output_tokens": 12}
    response = await ended(client, await begun(client, **fields))
    assert text_of(response) == text_of(await whole(client, **fields))


async def test_its_stream_is_followed_from_any_place(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script, engine.step_delay_s = says("Done."), 0.01
    path = await begun(client)
    streams = [client.get(f"{path}?stream=true{rest}") for rest in ("", "&starting_after=1", "&starting_after=4")]
    told, late, later = [(await stream).text for stream in map(asyncio.ensure_future, streams)]
    every = events_of(told)
    assert kinds_of(every) == [*QUEUED, *ADDED, *TEXT, *DONE, "completed"]
    assert events_of(late, 2) == every[2:]
    assert events_of(later, 5) == every[5:]


async def test_it_goes_on_when_its_stream_is_left(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    streamed = await client.post(RESPONSES, json=asking(background=True, stream=True, max_output_tokens=3))
    told = events_of(streamed.text)
    assert kinds_of(told)[:3] == QUEUED
    again = await client.get(f"{RESPONSES}/{told[0]['response']['id']}?stream=true")
    assert again.text == streamed.text


async def test_it_is_cancelled(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.first_delay_s = 60
    path = await begun(client)
    following = asyncio.ensure_future(client.get(f"{path}?stream=true"))
    response = (await client.post(f"{path}/cancel")).json()
    assert response["status"] == "cancelled"
    assert (await client.get(path)).json() == response
    assert kinds_of(events_of((await following).text))[-1] == "cancelled"
    assert engine.num_live == 0
    assert (await client.post(f"{path}/cancel")).json() == response


async def test_only_what_is_in_the_background_is_cancelled(client: httpx.AsyncClient) -> None:
    response = await whole(client)
    error_of(await client.post(f"{RESPONSES}/{response['id']}/cancel"))


async def test_a_failure_is_its_end(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after, engine.failure = 0, RequestFailedError("it broke")
    response = await ended(client, await begun(client))
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")


async def test_a_full_queue_promises_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.refuse = QueueFullError()
    error_of(await client.post(RESPONSES, json=asking(background=True)), 429, "rate_limit_exceeded")


async def test_it_is_deleted_while_it_is_made(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.first_delay_s = 60
    path = await begun(client)
    assert (await client.delete(path)).json()["deleted"]
    error_of(await client.get(path), 404)
    assert engine.num_live == 0


async def test_an_unfinished_one_is_nothing_to_go_on_from(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.first_delay_s = 60
    path = await begun(client)
    error_of(await client.post(RESPONSES, json=asking(previous_response_id=path.rpartition("/")[2])))
    await client.post(f"{path}/cancel")


@pytest.mark.parametrize("dies", [False, True])
async def test_it_is_made_after_a_restart(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path, dies: bool
) -> None:
    fields = {"input": "And?", "max_output_tokens": 12}
    async with running(make_app(data_dir=tmp_path)) as client:
        first = await whole(client, max_output_tokens=3)
        engine.first_delay_s = 0 if dies else 60
        engine.fail_after, engine.failure = (2, EngineUnavailableError("it ends")) if dies else (None, None)
        path = await begun(client, **fields, previous_response_id=first["id"])
    assert engine.num_live == 0
    engine.first_delay_s, engine.fail_after = 0, None
    async with running(make_app(data_dir=tmp_path)) as client:
        waiting = (await client.get(path)).json()
        while (response := (await client.get(path)).json())["status"] in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(0)  # until it is taken up, there is nothing to follow
        again = await whole(client, **fields, previous_response_id=first["id"], seed=response["seed"])
    assert waiting["id"] == response["id"]
    assert waiting["seed"] == response["seed"]
    assert text_of(response) == text_of(again)
