"""Errors: in Anthropic's form wherever they arise, with its statuses, and in its words where clients look for them."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from anthropic.types.shared import ErrorResponse
from fastapi import FastAPI

from server.engine.client import EngineState, QueueFullError
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of
from tests.server.messages.reading import COUNT, MESSAGES, error_of, message, refused


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", MESSAGES, 405, "invalid_request_error"),
        ("DELETE", COUNT, 405, "invalid_request_error"),
        ("GET", f"{MESSAGES}/batches", 404, "not_found_error"),
        ("POST", MESSAGES, 415, "invalid_request_error"),
    ],
)
async def test_errors_of_the_path(client: httpx.AsyncClient, method: str, path: str, status: int, kind: str):
    response = await client.request(method, path)
    error_of(response, status, kind)
    ErrorResponse.model_validate(response.json())


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"x"', b'{"a": 1, "a": 2}', b"\xff"])
async def test_bodies_that_are_none(client: httpx.AsyncClient, content: bytes):
    error_of(await client.post(MESSAGES, content=content, headers={"content-type": "application/json"}))


async def test_bodies_that_are_too_large(make_app: Callable[..., FastAPI]):
    async with client_of(make_app(max_body_mib=0.01)) as client:
        error_of(await client.post(MESSAGES, json=message(system="x" * 20_000)), 413, "request_too_large")


async def test_other_models(client: httpx.AsyncClient):
    for path in (MESSAGES, COUNT):
        error_of(await client.post(path, json=message(model="claude-x")), 404, "not_found_error")


async def test_a_full_queue_is_an_overload(client: httpx.AsyncClient, engine: FakeEngine):
    engine.refuse = QueueFullError()
    response = await client.post(MESSAGES, json=message(stream=True))
    error_of(response, 529, "overloaded_error")
    assert response.headers["retry-after"] == "1"
    assert (await client.post(CHAT, json=chat())).status_code == 429


async def test_an_engine_that_takes_no_work(client: httpx.AsyncClient, engine: FakeEngine):
    engine.state = EngineState.DRAINING
    for path in (MESSAGES, COUNT):
        error_of(await client.post(path, json=message()), 503, "api_error")


async def test_faults_of_the_server(client: httpx.AsyncClient, engine: FakeEngine):
    engine.refuse = RuntimeError("secret")
    error = error_of(await client.post(MESSAGES, json=message()), 500, "api_error")
    assert "secret" not in error["message"]


async def test_a_prompt_that_is_too_long(client: httpx.AsyncClient):
    said = {"role": "user", "content": "x" * 5000}
    text = await refused(client, message(messages=[said]), "messages", "context_length_exceeded")
    assert text.startswith("prompt is too long: 5019 tokens > 4095 maximum. This model's maximum context length is")
    assert text.endswith("or start the server with a model that has a longer context.")
    error_of(await client.post(MESSAGES, json=message(messages=[{**said, "content": "x" * 400_000}])))


async def test_too_much_output_for_a_strict_server(make_app: Callable[..., FastAPI]):
    async with client_of(make_app(strict=True)) as client:
        text = await refused(client, message(max_tokens=32_000), "messages", "context_length_exceeded")
    expected = "input length and `max_tokens` exceed context limit: 21 + 32000 > 4096, decrease input length or"
    assert text.startswith(expected)


async def test_what_clients_resend_without(strict_client: httpx.AsyncClient):
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    text = await refused(
        strict_client, message(context_management=edits), "context_management", "unsupported_parameter"
    )
    assert text.startswith("context_management: Extra inputs are not permitted")


async def test_threads_are_refused_as_clients_expect(client: httpx.AsyncClient):
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        error = error_of(await client.post(f"{MESSAGES}?beta=true", json=message(thread=thread)))
        assert error["details"]["error_code"] == "thread_unsupported_request"
        assert error["details"]["unsupported"] == ["thread"]


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({}, False),
        ({"x-api-key": "wrong"}, False),
        ({"authorization": "Bearer wrong"}, False),
        ({"x-api-key": ""}, False),
        ({"x-api-key": "right"}, True),
        ({"authorization": "Bearer right"}, True),
        ({"authorization": "Basic abc", "x-api-key": "right"}, True),
        ({"authorization": "Bearer wrong", "x-api-key": "right"}, False),
    ],
)
async def test_keys(make_app: Callable[..., FastAPI], headers: dict[str, str], is_let_in: bool):
    async with client_of(make_app(api_key="right")) as client:
        for version in ("2023-06-01", "2026-10-21", "x"):
            asked: Any = {"headers": {**headers, "anthropic-version": version, "anthropic-beta": "a,b"}}
            response = await client.post(MESSAGES, json=message(max_tokens=2), **asked)
            models = await client.get("/v1/models", **asked)
            assert models.status_code == response.status_code
            if is_let_in:
                assert response.status_code == 200
            else:
                error_of(response, 401, "authentication_error")
                error_of(models, 401, "authentication_error")
        assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == (200 if is_let_in else 401)
