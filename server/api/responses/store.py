"""Stored responses and conversations, as rows. Each function is the work of one transaction."""

import json
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from server.api.openai.pages import ListQuery, no_such_item
from server.api.responses.intent import Found, References
from server.errors import InvalidRequestError, NotFoundError, UnavailableError, shorten
from server.storage.rows import UNFINISHED, Row, Rows

RESPONSE, CONVERSATION, ITEM, EVENTS, JOB = "response", "conversation", "item", "events", "job"
_INPUT, _OUTPUT = "input", "output"
UNMADE = ("queued", "in_progress")
_BREAK = b"\n\n"
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a response comes from, beside its own object."""

    client: str
    items: Sequence[Fields]
    """Of its input."""
    conversation: str | None
    is_stored: bool


def promise(rows: Rows, response: Fields, origin: Origin, job: bytes) -> None:
    """Write down a response that is to be made; `job` is all that it takes."""
    rows.put(
        Row(RESPONSE, response["id"], origin.client, _json(response), state=UNFINISHED),
        Row(JOB, response["id"], origin.client, job, parent=response["id"]),
        *_items(origin.items, origin.client, response["id"], _INPUT),
    )


def keep(rows: Rows, response: Fields, origin: Origin, events: Sequence[bytes]) -> None:
    """Write down a response that has ended, and its part of the conversation."""
    response_id = response["id"]
    if origin.is_stored:
        rows.delete(JOB, response_id, origin.client, parent=response_id)
        rows.put(
            Row(RESPONSE, response_id, origin.client, _json(response), state=response["status"]),
            *_items(origin.items, origin.client, response_id, _INPUT),
            *_items(response["output"], origin.client, response_id, _OUTPUT),
        )
        rows.renew(RESPONSE, response_id)
        if events:
            rows.put(Row(EVENTS, response_id, origin.client, zlib.compress(b"".join(events)), parent=response_id))
    if origin.conversation is not None and rows.get(CONVERSATION, origin.conversation, origin.client, parent=""):
        append(rows, origin.conversation, [*origin.items, *response["output"]], origin.client)


def is_promised(rows: Rows, response_id: str, client: str) -> bool:
    """Whether it is still to be made: it was neither cancelled nor deleted, and has not ended."""
    return rows.get(JOB, response_id, client, parent=response_id) is not None


def fulfil(rows: Rows, response: Fields, origin: Origin, events: Sequence[bytes]) -> None:
    """Write down a response that was promised, if it still is."""
    if is_promised(rows, response["id"], origin.client):
        keep(rows, response, origin, events)


def give_up(rows: Rows, response_id: str, client: str, failure: Fields) -> None:
    """Have a response that was promised end with this error, if it is still promised."""
    if is_promised(rows, response_id, client):
        failed = {**find_response(rows, response_id, client), "status": "failed", "error": failure}
        keep(rows, failed, Origin(client, (), None, is_stored=True), ())


def find_response(rows: Rows, response_id: str, client: str) -> Fields:
    """The object. Raises NotFoundError."""
    row = rows.get(RESPONSE, response_id, client, parent="")
    if row is None:
        raise _not_found("Response", response_id)
    return _read(row)


def cancel(rows: Rows, response_id: str, client: str) -> Fields:
    """The response, of which no more is made; one that has ended stays as it is.

    Raises NotFoundError, and InvalidRequestError for one that its client has waited for.
    """
    response = find_response(rows, response_id, client)
    if not response["background"]:
        message = "Invalid 'response_id': only responses in the background can be cancelled."
        raise InvalidRequestError(message, param="response_id", code="invalid_value")
    if response["status"] in UNMADE:
        response = {**response, "status": "cancelled"}
        rows.delete(JOB, response_id, client, parent=response_id)
        rows.put(Row(RESPONSE, response_id, client, _json(response), state="cancelled"))
    return response


def delete_response(rows: Rows, response_id: str, client: str) -> None:
    """Raises NotFoundError."""
    if not rows.delete(RESPONSE, response_id, client):
        raise _not_found("Response", response_id)


def input_page(rows: Rows, response_id: str, client: str, asked: ListQuery) -> Fields:
    """Some of the items of a response's input, as a list object. Raises NotFoundError and InvalidRequestError."""
    if rows.get(RESPONSE, response_id, client, parent="") is None:
        raise _not_found("Response", response_id)
    return _page(rows, response_id, _INPUT, asked)


def events_of(rows: Rows, response_id: str, client: str) -> Sequence[bytes]:
    """The frames of a response's stream.

    Raises NotFoundError, InvalidRequestError if it had none, UnavailableError while nobody makes it.
    """
    if find_response(rows, response_id, client)["status"] in UNMADE:
        raise UnavailableError("The server was started again, and has not come to this response yet.")
    row = rows.get(EVENTS, response_id, client, parent=response_id)
    if row is None:
        message = "Invalid 'stream': this response was not streamed when it was made."
        raise InvalidRequestError(message, param="stream", code="invalid_value")
    frames = zlib.decompress(row.body).split(_BREAK)
    return [frame + _BREAK for frame in frames[:-1]]


def unfinished(rows: Rows) -> Sequence[Row]:
    """What it takes to make each response that was promised, in the order of the promises."""
    return rows.of_kind(JOB)


def find(rows: Rows, names: References, client: str) -> Found:
    """Find what a body names. Raises InvalidRequestError, which NotFoundError is, for what is not there."""
    context: Sequence[Row] = ()
    if names.response is not None:
        context = _conversation_until(rows, names.response, client)
    elif names.conversation is not None:
        find_conversation(rows, names.conversation, client, "conversation")
        context = rows.of_parent(ITEM, names.conversation)
    items: dict[str, Row] = {}
    for item_id in names.items:
        row = rows.get(ITEM, item_id, client)
        if row is None:
            raise _not_found("Item", item_id, "input")
        items[item_id] = row
    num_bytes = sum(len(row.body) for row in (*context, *items.values()))
    return Found([_raw(row) for row in context], {name: _raw(row) for name, row in items.items()}, num_bytes)


def find_conversation(rows: Rows, conversation_id: str, client: str, param: str | None = None) -> Fields:
    """The object. Raises NotFoundError."""
    row = rows.get(CONVERSATION, conversation_id, client, parent="")
    if row is None:
        raise _not_found("Conversation", conversation_id, param)
    return _read(row)


def keep_conversation(rows: Rows, conversation: Fields, client: str) -> None:
    """Write down the object."""
    rows.put(Row(CONVERSATION, conversation["id"], client, _json(conversation)))


def delete_conversation(rows: Rows, conversation_id: str, client: str) -> None:
    """Raises NotFoundError."""
    if not rows.delete(CONVERSATION, conversation_id, client):
        raise _not_found("Conversation", conversation_id)


def conversation_page(rows: Rows, conversation_id: str, client: str, asked: ListQuery) -> Fields:
    """Some of its items, as a list object. Raises NotFoundError and InvalidRequestError."""
    find_conversation(rows, conversation_id, client)
    return _page(rows, conversation_id, "", asked)


def conversation_item(rows: Rows, conversation_id: str, item_id: str, client: str) -> bytes:
    """One of its items, in JSON. Raises NotFoundError."""
    find_conversation(rows, conversation_id, client)
    row = rows.get(ITEM, item_id, client, parent=conversation_id)
    if row is None:
        raise _not_found("Item", item_id)
    return row.body


def delete_conversation_item(rows: Rows, conversation_id: str, item_id: str, client: str) -> Fields:
    """The conversation without this item. Raises NotFoundError."""
    conversation = find_conversation(rows, conversation_id, client)
    if not rows.delete(ITEM, item_id, client, parent=conversation_id):
        raise _not_found("Item", item_id)
    return conversation


def append(rows: Rows, conversation_id: str, items: Sequence[Fields], client: str) -> Sequence[Fields]:
    """Add items to a conversation; returns them, with new ids where others in it have theirs."""
    added = [
        item if rows.get(ITEM, item["id"], client, parent=conversation_id) is None else {**item, "id": _new_id()}
        for item in items
    ]
    rows.put(*_items(added, client, conversation_id, ""))
    rows.renew(CONVERSATION, conversation_id)
    return added


def _conversation_until(rows: Rows, response_id: str, client: str) -> Sequence[Row]:
    """The items of a response, and of all before it in its conversation, which count as used."""
    responses: list[str] = []
    before: str | None = response_id
    while before is not None:
        row = rows.get(RESPONSE, before, client, parent="")
        if row is None:
            lost = "" if before == response_id else f": '{before}', which it goes on from, is not stored any more"
            raise no_previous_response(response_id, lost)
        if row.state == UNFINISHED:
            message = f"Invalid 'previous_response_id': the response '{before}' is not finished."
            raise InvalidRequestError(message, param="previous_response_id", code="invalid_value")
        response = _read(row)
        if "conversation" in response:
            message = f"Invalid 'previous_response_id': '{before}' is part of a conversation. Name that instead."
            raise InvalidRequestError(message, param="previous_response_id", code="invalid_value")
        responses.append(before)
        before = response["previous_response_id"]
    responses.reverse()
    for one in responses:
        rows.renew_old(RESPONSE, one)
    return [row for one in responses for row in rows.of_parent(ITEM, one)]


def _page(rows: Rows, parent: str, state: str, asked: ListQuery) -> Fields:
    """The list object for items of a parent, of which none is parsed: all keys wait for the storage's thread."""
    found = rows.some_of_parent(
        ITEM, parent, state, after=asked.after, newest_first=asked.order == "desc", limit=asked.limit + 1
    )
    if found is None:
        raise no_such_item(asked)
    listed = found[: asked.limit]
    return {
        "object": "list",
        "data": [_raw(row) for row in listed],
        "first_id": listed[0].id if listed else None,
        "last_id": listed[-1].id if listed else None,
        "has_more": len(found) > asked.limit,
    }


def _items(items: Sequence[Fields], client: str, parent: str, state: str) -> Sequence[Row]:
    return [Row(ITEM, item["id"], client, _json(item), parent, state) for item in items]


def _new_id() -> str:
    return f"item_{uuid.uuid4().hex}"


def _json(value: Fields) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _raw(row: Row) -> msgspec.Raw:
    return msgspec.Raw(row.body)


def _read(row: Row) -> Fields:
    value: Fields = json.loads(row.body)
    return value


def no_previous_response(response_id: str, why: str = "") -> InvalidRequestError:
    """Return the error for a response that cannot be continued; by its code, clients know to send the whole history."""
    message = f"Previous response with id '{shorten(response_id, 128)}' not found{why}."
    return InvalidRequestError(message, param="previous_response_id", code="previous_response_not_found")


def _not_found(what: str, row_id: str, param: str | None = None) -> NotFoundError:
    return NotFoundError(f"{what} with id '{shorten(row_id, 128)}' not found.", param=param, code="not_found")
