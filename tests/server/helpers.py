"""Calling the application, in memory and over a socket, and reading what it answers."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from scheduler.interface import EngineRequest
from tests.server.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve the application on a free port of this machine; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, host="127.0.0.1", log_config=None, ws="none", lifespan="off"))
    ready = threading.Event()

    async def serve() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        ready.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


def events_of(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, which must be well formed and end with [DONE]."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert "\n" not in "".join(data)
    assert data.pop() == "[DONE]"
    return [json.loads(block) for block in data]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", "max_tokens": 5, **fields}


def error_of(response: httpx.Response, status: int = 400, kind: str = "invalid_request_error") -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == kind
    assert len(body["error"]["message"]) < 600
    return body["error"]


async def requested(client: httpx.AsyncClient, engine: FakeEngine, path: str, body: object) -> EngineRequest:
    """What the engine is asked for, of the last prompt."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return engine.requests[-1]


async def refused(client: httpx.AsyncClient, path: str, body: object, param: str | None, code: str | None) -> str:
    error = error_of(await client.post(path, json=body))
    assert (error["param"], error["code"]) == (param, code), error
    return error["message"]
