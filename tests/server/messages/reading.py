"""Asking the application for messages, and reading what it answers as a strict client does."""

import json
from typing import Any

import httpx
import msgspec
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from server.api.messages.answer import AnsweredMessage, MessageEvent

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
_RAW_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def message(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, **fields}


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which must be one of ours, and of Anthropic's client unless it is a ping."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert text.isascii()
    events = []
    for block in blocks:
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        msgspec.convert(event, MessageEvent)
        if event["type"] not in ("ping", "error"):
            _RAW_EVENT.validate_python(event)
        events.append(event)
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a complete stream make."""
    first, ping, *middle, delta, last = events
    assert (first["type"], ping["type"], delta["type"]) == ("message_start", "ping", "message_delta")
    assert last == {"type": "message_stop"}
    whole = first["message"]
    assert whole["content"] == []
    content: list[dict[str, Any]] = []
    is_open = False
    for event in middle:
        if event["type"] == "ping":
            continue
        if event["type"] == "content_block_start":
            assert not is_open
            content.append({**event["content_block"], "json": ""})
        assert event["index"] == len(content) - 1
        is_open = event["type"] != "content_block_stop"
        if event["type"] == "content_block_delta":
            _add(content[-1], event["delta"])
    assert not is_open
    whole["content"] = [_built(block) for block in content]
    assert first["message"]["usage"].keys() == delta["usage"].keys()
    return {**whole, **delta["delta"], "usage": delta["usage"]}


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    names = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    if delta["type"] == "input_json_delta":
        block["json"] += delta["partial_json"]
    else:
        block[names[delta["type"]]] += delta[names[delta["type"]]]


def _built(block: dict[str, Any]) -> dict[str, Any]:
    text = block.pop("json")
    return {**block, "input": json.loads(text)} if text else block


async def answered(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """A whole answer; streamed, it is the same."""
    response = await client.post(MESSAGES, json=message(**fields))
    assert response.status_code == 200, response.text
    whole = response.json()
    msgspec.convert(whole, AnsweredMessage)
    Message.model_validate(whole)
    streamed = await client.post(MESSAGES, json=message(**fields, stream=True))
    assert streamed.status_code == 200, streamed.text
    assert without_ids(joined(events_of(streamed.text))) == without_ids(whole)
    return whole


def without_ids(whole: dict[str, Any]) -> dict[str, Any]:
    """The part of an answer that is equal in two runs with the same seed."""
    content = [{**block, "id": ""} if "id" in block else block for block in whole["content"]]
    kept = {name: value for name, value in whole.items() if name not in ("id", "seed")}
    return {**kept, "content": content}


def error_of(response: httpx.Response, status: int = 400, kind: str = "invalid_request_error") -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return body["error"]


async def refused(client: httpx.AsyncClient, body: object, param: str | None, code: str, path: str = MESSAGES) -> str:
    """The message of the error for a field, which it names."""
    error = error_of(await client.post(path, json=body))
    details = error["details"]
    assert (details.get("param"), details["error_code"]) == (param, code), error
    assert param is None or param in error["message"]
    return error["message"]
