"""Stored responses and conversations as rows. Each function runs in one transaction."""

import json
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from server.api.openai.pages import ListQuery, no_such_item
from server.api.responses.objects import ItemList, ResponseFailure, ResponseObject
from server.errors import InvalidRequestError, NotFoundError, UnavailableError, shorten
from server.storage.rows import UNFINISHED, Row, Rows

RESPONSE, CONVERSATION, ITEM, EVENTS, JOB = "response", "conversation", "item", "events", "job"
_INPUT, _OUTPUT = "input", "output"
NOT_ENDED = ("queued", "in_progress")
_BREAK = b"\n\n"
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """The client, the input and the conversation of a response."""

    client: str
    items: Sequence[Fields]
    """Items of the response's input."""
    conversation: str | None
    is_stored: bool


@dataclass(frozen=True, slots=True)
class References:
    """The ids of stored objects that a body refers to."""

    response: str | None = None
    conversation: str | None = None
    items: Sequence[str] = ()

    def __bool__(self) -> bool:
        return self.response is not None or self.conversation is not None or bool(self.items)


@dataclass(frozen=True, slots=True)
class Found:
    """Stored objects that a body refers to, as JSON. The body worker parses them."""

    context: Sequence[msgspec.Raw] = ()
    """The items of the conversation so far."""
    items: Mapping[str, msgspec.Raw] = field(default_factory=dict)
    """The items that are referred to one by one, by their ids."""
    num_bytes: int = 0
    """Size of all items."""


def add_pending(rows: Rows, response: ResponseObject, origin: Origin, job: bytes) -> None:
    """Store a pending background response; `job` has everything that is needed to generate it."""
    rows.put(
        Row(RESPONSE, response.id, origin.client, msgspec.json.encode(response), state=UNFINISHED),
        Row(JOB, response.id, origin.client, job, parent=response.id),
        *_items(origin.items, origin.client, response.id, _INPUT),
    )


def keep(rows: Rows, response: ResponseObject, origin: Origin, events: Sequence[bytes]) -> None:
    """Store a response that has ended, and add it to its conversation."""
    row = Row(RESPONSE, response.id, origin.client, msgspec.json.encode(response), state=response.status)
    written = ((item.id, msgspec.json.encode(item)) for item in response.output)  # not parsed: it may have megabytes
    output = [Row(ITEM, item_id, origin.client, item, response.id, _OUTPUT) for item_id, item in written]
    _keep(rows, row, output, origin, events)


def _keep(rows: Rows, response: Row, output: Sequence[Row], origin: Origin, events: Sequence[bytes]) -> None:
    if origin.is_stored:
        rows.delete(JOB, response.id, origin.client, parent=response.id)
        rows.put(response, *_items(origin.items, origin.client, response.id, _INPUT), *output)
        rows.renew(RESPONSE, response.id)
        if events:
            rows.put(Row(EVENTS, response.id, origin.client, zlib.compress(b"".join(events)), parent=response.id))
    if origin.conversation is not None and rows.get(CONVERSATION, origin.conversation, origin.client, parent=""):
        append(rows, origin.conversation, [*origin.items, *map(_read, output)], origin.client)


def is_pending(rows: Rows, response_id: str, client: str) -> bool:
    """Whether a background response is pending: not ended, cancelled or deleted."""
    return rows.get(JOB, response_id, client, parent=response_id) is not None


def finish_pending(rows: Rows, response: ResponseObject, origin: Origin, events: Sequence[bytes]) -> None:
    """Store a background response that has ended, if it is still pending."""
    if is_pending(rows, response.id, origin.client):
        keep(rows, response, origin, events)


def fail_pending(rows: Rows, response_id: str, client: str, failure: ResponseFailure) -> None:
    """Store a background response as failed, if it is still pending."""
    if is_pending(rows, response_id, client):
        failed = {**find_response(rows, response_id, client), "status": "failed", "error": msgspec.to_builtins(failure)}
        output = _items(failed["output"], client, response_id, _OUTPUT)
        row = Row(RESPONSE, response_id, client, _json(failed), state="failed")
        _keep(rows, row, output, Origin(client, (), None, is_stored=True), ())


def find_response(rows: Rows, response_id: str, client: str) -> Fields:
    """The response's object. Raises NotFoundError."""
    row = rows.get(RESPONSE, response_id, client, parent="")
    if row is None:
        raise _not_found("Response", response_id)
    return _read(row)


def cancel(rows: Rows, response_id: str, client: str) -> Fields:
    """Cancel a background response and return it. A response that has ended stays unchanged.

    Raises NotFoundError, and InvalidRequestError if it is not a background response.
    """
    response = find_response(rows, response_id, client)
    if not response["background"]:
        message = "Invalid 'response_id': only background responses can be cancelled."
        raise InvalidRequestError(message, param="response_id", code="invalid_value")
    if response["status"] in NOT_ENDED:
        response = {**response, "status": "cancelled"}
        rows.delete(JOB, response_id, client, parent=response_id)
        rows.put(Row(RESPONSE, response_id, client, _json(response), state="cancelled"))
    return response


def delete_response(rows: Rows, response_id: str, client: str) -> None:
    """Delete a response. Raises NotFoundError."""
    if not rows.delete(RESPONSE, response_id, client):
        raise _not_found("Response", response_id)


def input_page(rows: Rows, response_id: str, client: str, asked: ListQuery) -> ItemList:
    """A page of the items of a response's input. Raises NotFoundError and InvalidRequestError."""
    if rows.get(RESPONSE, response_id, client, parent="") is None:
        raise _not_found("Response", response_id)
    return _page(rows, response_id, _INPUT, asked)


def events_of(rows: Rows, response_id: str, client: str) -> Sequence[bytes]:
    """The frames of a response's stream.

    Raises NotFoundError, InvalidRequestError if it was not streamed, UnavailableError until it is generated again.
    """
    if find_response(rows, response_id, client)["status"] in NOT_ENDED:
        raise UnavailableError("The server has restarted and not resumed this response yet. Please try again later.")
    row = rows.get(EVENTS, response_id, client, parent=response_id)
    if row is None:
        message = (
            "Invalid 'stream': this response has no stored events. It was not created with 'stream', or they were "
        )
        message += "too large, which its 'warnings' say."
        raise InvalidRequestError(message, param="stream", code="invalid_value")
    frames = zlib.decompress(row.body).split(_BREAK)
    return [frame + _BREAK for frame in frames[:-1]]


def pending_jobs(rows: Rows) -> Sequence[Row]:
    """The jobs of all pending background responses, oldest first."""
    return rows.of_kind(JOB)


def find(rows: Rows, references: References, client: str) -> Found:
    """Find the referenced objects. Raises InvalidRequestError (mostly NotFoundError) for a missing one."""
    context: Sequence[Row] = ()
    if references.response is not None:
        context = _conversation_until(rows, references.response, client)
    elif references.conversation is not None:
        find_conversation(rows, references.conversation, client, "conversation")
        context = rows.of_parent(ITEM, references.conversation)
    items: dict[str, Row] = {}
    for item_id in references.items:
        row = rows.get(ITEM, item_id, client)
        if row is None:
            raise _not_found("Item", item_id, "input")
        items[item_id] = row
    num_bytes = sum(len(row.body) for row in (*context, *items.values()))
    return Found([_raw(row) for row in context], {name: _raw(row) for name, row in items.items()}, num_bytes)


def find_conversation(rows: Rows, conversation_id: str, client: str, param: str | None = None) -> Fields:
    """The conversation's object. Raises NotFoundError."""
    row = rows.get(CONVERSATION, conversation_id, client, parent="")
    if row is None:
        raise _not_found("Conversation", conversation_id, param)
    return _read(row)


def keep_conversation(rows: Rows, conversation: Fields, client: str) -> None:
    """Store a conversation's object."""
    rows.put(Row(CONVERSATION, conversation["id"], client, _json(conversation)))


def delete_conversation(rows: Rows, conversation_id: str, client: str) -> None:
    """Delete a conversation. Raises NotFoundError."""
    if not rows.delete(CONVERSATION, conversation_id, client):
        raise _not_found("Conversation", conversation_id)


def conversation_page(rows: Rows, conversation_id: str, client: str, asked: ListQuery) -> ItemList:
    """A page of a conversation's items. Raises NotFoundError and InvalidRequestError."""
    find_conversation(rows, conversation_id, client)
    return _page(rows, conversation_id, "", asked)


def conversation_item(rows: Rows, conversation_id: str, item_id: str, client: str) -> bytes:
    """One item of a conversation, in JSON. Raises NotFoundError."""
    find_conversation(rows, conversation_id, client)
    row = rows.get(ITEM, item_id, client, parent=conversation_id)
    if row is None:
        raise _not_found("Item", item_id)
    return row.body


def delete_conversation_item(rows: Rows, conversation_id: str, item_id: str, client: str) -> Fields:
    """Delete an item of a conversation, and return the conversation. Raises NotFoundError."""
    conversation = find_conversation(rows, conversation_id, client)
    if not rows.delete(ITEM, item_id, client, parent=conversation_id):
        raise _not_found("Item", item_id)
    return conversation


def append(rows: Rows, conversation_id: str, items: Sequence[Fields], client: str) -> Sequence[Fields]:
    """Add items to a conversation. Returns them; items whose ids are taken get new ones."""
    added = [
        item if rows.get(ITEM, item["id"], client, parent=conversation_id) is None else {**item, "id": _new_id()}
        for item in items
    ]
    rows.put(*_items(added, client, conversation_id, ""))
    rows.renew(CONVERSATION, conversation_id)
    return added


def _conversation_until(rows: Rows, response_id: str, client: str) -> Sequence[Row]:
    """The items of a response and of all responses before it. All of them count as recently used."""
    responses: list[str] = []
    before: str | None = response_id
    while before is not None:
        row = rows.get(RESPONSE, before, client, parent="")
        if row is None:
            lost = "" if before == response_id else f": '{before}', which it continues, is no longer stored"
            raise no_previous_response(response_id, lost)
        if row.state == UNFINISHED:
            message = f"Invalid 'previous_response_id': the response '{before}' is not finished."
            raise InvalidRequestError(message, param="previous_response_id", code="invalid_value")
        response = _read(row)
        if "conversation" in response:
            message = (
                f"Invalid 'previous_response_id': '{before}' is part of a conversation. Use 'conversation' instead."
            )
            raise InvalidRequestError(message, param="previous_response_id", code="invalid_value")
        responses.append(before)
        before = response["previous_response_id"]
    responses.reverse()
    for one in responses:
        rows.renew_old(RESPONSE, one)
    return [row for one in responses for row in rows.of_parent(ITEM, one)]


def _page(rows: Rows, parent: str, state: str, asked: ListQuery) -> ItemList:
    """A page of a parent's items. They are not parsed, because that would block the storage's only thread."""
    found = rows.some_of_parent(
        ITEM, parent, state, after=asked.after, newest_first=asked.order == "desc", limit=asked.limit + 1
    )
    if found is None:
        raise no_such_item(asked)
    listed = found[: asked.limit]
    return ItemList(
        data=cast("Sequence[Fields]", [_raw(row) for row in listed]),
        first_id=listed[0].id if listed else None,
        last_id=listed[-1].id if listed else None,
        has_more=len(found) > asked.limit,
    )


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
    """The error for a response that cannot be continued. At its code, clients send the whole conversation."""
    message = f"Previous response with id '{shorten(response_id, 128)}' not found{why}."
    return InvalidRequestError(message, param="previous_response_id", code="previous_response_not_found")


def _not_found(what: str, row_id: str, param: str | None = None) -> NotFoundError:
    return NotFoundError(f"{what} with id '{shorten(row_id, 128)}' not found.", param=param, code="not_found")
