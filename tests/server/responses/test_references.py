"""References to stored objects: found before a body is checked, so that it is checked once."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.api.responses.references import CompactNames, ItemNames, Names, ResponseNames, references_in
from server.api.responses.store import References
from tests.server.helpers import client_of, error_of
from tests.server.responses.calling import RESPONSES, asking, whole

_REFERENCE = {"type": "item_reference", "id": "item_1"}


@pytest.mark.parametrize(
    ("names", "body", "references"),
    [
        (ResponseNames, {"input": "a"}, References()),
        (ResponseNames, {"input": "a", "previous_response_id": "resp_1"}, References("resp_1")),
        (ResponseNames, {"input": "a", "previous_response_id": None, "conversation": None}, References()),
        (ResponseNames, {"conversation": "conv_1"}, References(None, "conv_1")),
        (ResponseNames, {"conversation": {"id": "conv_1"}, "input": []}, References(None, "conv_1")),
        (ResponseNames, {"input": [_REFERENCE, {"id": "item_2"}]}, References(items=["item_1", "item_2"])),
        (ResponseNames, {"input": [{"type": None, "id": "item_2"}]}, References(items=["item_2"])),
        (ResponseNames, {"input": [{"role": "user", "content": "a", "id": "item_2"}]}, References()),
        (ResponseNames, {"input": [{"type": "message", "id": "item_2"}]}, References()),
        (ResponseNames, {"input": [{"type": "function_call", "id": "item_2", "x": [{"id": "x"}]}]}, References()),
        (ResponseNames, {"items": [_REFERENCE]}, References()),
        (CompactNames, {"input": [_REFERENCE], "conversation": 5}, References(items=["item_1"])),
        (CompactNames, {"previous_response_id": "resp_1", "conversation": "conv_1"}, References("resp_1")),
        (ItemNames, {"items": [_REFERENCE], "input": 5}, References(items=["item_1"])),
        (ItemNames, {"items": None}, References()),
    ],
)
def test_they_are_found_in_the_fields_of_a_schema(
    names: type[Names], body: Mapping[str, Any], references: References
) -> None:
    found = references_in(json.dumps(body).encode(), names)
    assert (found.response, found.conversation, list(found.items)) == (
        references.response,
        references.conversation,
        list(references.items),
    )
    assert bool(found) == bool(references)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{", b'{"input": 5}', b'{"conversation": [1]}', b'{"previous_response_id": 1}', b'{"input": [5]}',
        b'{"input": [{"id": "\xff"}]}', b'{"input": [{"id": "\\ud800"}]}', b'{"input":' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_malformed_body_has_none(body: bytes) -> None:
    assert not references_in(body, ResponseNames)


async def test_a_body_with_references_is_checked_once(
    make_app: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    intake, works = app.state.services.models.default.body_worker, []
    run = intake.run

    async def counted(work: Any, *args: Any, **fields: Any) -> Any:
        works.append(work.__name__)
        return await run(work, *args, **fields)

    async with client_of(app) as client:
        first = await whole(client)
        monkeypatch.setattr(intake, "run", counted)
        items = [{"type": "item_reference", "id": first["output"][0]["id"]}]
        await whole(client, input=items, previous_response_id=first["id"])
    assert works == ["plan_response"]


async def test_errors_of_the_body_come_before_references_to_nothing(client: httpx.AsyncClient) -> None:
    asked = asking(previous_response_id="resp_none")
    assert error_of(await client.post(RESPONSES, json={**asked, "temperature": 5}), 400)["param"] == "temperature"
    assert error_of(await client.post(RESPONSES, json=asked), 400)["code"] == "previous_response_not_found"


async def test_a_worker_process_gets_what_was_found(client: httpx.AsyncClient) -> None:
    costly = {"tools": [{"type": "function", "name": "look"}]}
    first = await whole(client)
    second = await whole(client, previous_response_id=first["id"], **costly)
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    answer = await client.post(RESPONSES, json=asking(previous_response_id="resp_none", **costly))
    assert error_of(answer, 400)["code"] == "previous_response_not_found"
