"""Calling the responses of the application, and holding what it answers to the types of OpenAI's client."""

import json
from typing import Any

import httpx
import msgspec
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from server.api.responses.objects import ResponseEvent, ResponseObject

RESPONSES = "/v1/responses"
CONVERSATIONS = "/v1/conversations"
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_VARIES = ("id", "created_at", "completed_at", "seed", "call_id")
Event = dict[str, Any]


def asking(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "hi", "max_output_tokens": 400, **fields}


async def whole(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The response object."""
    answer = await client.post(RESPONSES, json=asking(**fields))
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    msgspec.convert(answer.json(), ResponseObject)
    return answer.json()


async def events(client: httpx.AsyncClient, **fields: Any) -> list[Event]:
    """The events of the response's stream."""
    answer = await client.post(RESPONSES, json=asking(stream=True, **fields))
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def events_of(text: str, start: int = 0) -> list[Event]:
    """The events of a stream, each of which is one that the client knows, and has the next number; then [DONE]."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    del blocks[-2:]
    told = []
    for block in blocks:
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        if event["type"] != "keepalive":
            told.append(event)
    for number, event in enumerate(told, start):
        assert event["sequence_number"] == number
        if event["type"] != "response.cancelled":
            _EVENT.validate_python(event)
        msgspec.convert(event, ResponseEvent)
    return told


def kinds_of(told: list[Event]) -> list[str]:
    """Their types, of several deltas in a row one."""
    kinds = [event["type"].removeprefix("response.") for event in told]
    return [kind for place, kind in enumerate(kinds) if not kind.endswith(".delta") or kinds[place - 1] != kind]


def built(told: list[Event]) -> list[dict[str, Any]]:
    """The output that a client has put together from the events before the last one."""
    items: dict[int, dict[str, Any]] = {}
    texts: dict[tuple[str, str], str] = {}
    for event in told:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items[event["output_index"]] = event["item"]
        elif kind.endswith(".delta"):
            key = (event["item_id"], kind.removesuffix(".delta"))
            texts[key] = texts.get(key, "") + event["delta"]
        elif kind == "output_item.done":
            assert items[event["output_index"]]["id"] == event["item"]["id"]
            items[event["output_index"]] = event["item"]
        elif kind.endswith(".done") and "part" not in kind:
            text = next(event[name] for name in ("text", "arguments", "input") if name in event)
            assert texts.get((event["item_id"], kind.removesuffix(".done")), "") == text
    return [items[index] for index in sorted(items)]


def plain(value: Any) -> Any:
    """The part of an answer that is equal in two runs."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key not in _VARIES}
    return [plain(one) for one in value] if isinstance(value, list) else value


async def both(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The whole response, which is the same when it is streamed."""
    response = await whole(client, **fields)
    told = await events(client, **fields)
    last = told[-1]["response"]
    assert told[-1]["type"] == f"response.{last['status']}"
    assert built(told) == last["output"]
    assert plain(last) == plain(response)
    return response


def text_of(response: dict[str, Any]) -> str:
    return Response.model_validate(response).output_text
