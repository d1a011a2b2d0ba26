"""Calling the application, in memory and over a socket, and reading what it answers."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from scheduler.interface import EngineRequest
from server.http.connection import limited_connection
from tests.server.fake_engine import FakeEngine, Script, scripted
from tests.server.tiny_model import END

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@contextmanager
def serving(app: FastAPI, websockets: Mapping[str, int] | None = None, client_timeout_s: float = 30.0) -> Iterator[str]:
    """Serve the application on a free port of this machine, also over these websockets; yields its address."""
    http = limited_connection(client_timeout_s, websockets)
    config = uvicorn.Config(app, port=0, host="127.0.0.1", log_config=None, http=http, ws="none", lifespan="off")
    server = uvicorn.Server(config)
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
    """The engine request for the last prompt of a body."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return engine.requests[-1]


async def refused(client: httpx.AsyncClient, path: str, body: object, param: str | None, code: str | None) -> str:
    error = error_of(await client.post(path, json=body))
    assert (error["param"], error["code"]) == (param, code), error
    return error["message"]


def says(*texts: str) -> Script:
    """A model that writes these texts, one for each choice, and ends."""
    return scripted(*([*text.encode(), END] for text in texts))


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that the chunks of a stream make, with messages as in whole answers."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            building = choices.setdefault(choice["index"], {"message": {}})
            assert "finish_reason" not in building, "nothing comes after the end"
            _add_delta(building["message"], choice["delta"])
            if choice["finish_reason"] is not None:
                building["finish_reason"] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            for call in value:
                _add_call(message.setdefault("tool_calls", []), call)
        elif key == "function_call":
            _add_delta(message.setdefault("function_call", {}), value)
        else:
            message[key] = message.get(key, "") + value


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """As strict clients do: id, type and name come once, with the number of the call after the last one."""
    kind = "custom" if "custom" in delta else "function"
    if delta["index"] == len(calls):
        assert set(delta) == {"index", "id", "type", kind}
        assert delta["type"] == kind
        calls.append({"id": delta["id"], "type": kind, kind: dict(delta[kind])})
        return
    assert delta["index"] == len(calls) - 1
    assert set(delta) == {"index", kind}
    assert "name" not in delta[kind]
    _add_delta(calls[-1][kind], delta[kind])


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message of a whole or a joined answer, with all that two runs of a request have in common."""
    kept = {key: value for key, value in message.items() if value not in (None, "", [])}
    if "tool_calls" in kept:
        kept["tool_calls"] = [{**call, "id": None} for call in kept["tool_calls"]]
    return kept
