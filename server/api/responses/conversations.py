"""Endpoints of stored conversations, /v1/conversations."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, to_builtins
from msgspec.structs import replace
from pydantic import Field

from server.api.body_worker import BodyContext
from server.api.dialect import Dialect
from server.api.endpoint import body_as
from server.api.fields.openai import Metadata
from server.api.fields.rules import RequestModel
from server.api.openai.pages import query_of
from server.api.openapi import answers, documented_errors, takes
from server.api.responses import store
from server.api.responses.intent import input_items
from server.api.responses.items import InputItem
from server.api.responses.objects import ConversationObject, Deleted, ItemList
from server.api.responses.references import ItemNames, Lookup, RequestMeta, incoming_body, parsed
from server.api.responses.schema import ItemsQuery
from server.api.services import Services, ServicesDep
from server.generation.notices import Notice, as_headers, to_report
from server.http.middleware import record_of
from server.http.responses import json_response
from server.storage.rows import Rows

MAX_ITEMS = 20
"""The most items that a request may add: OpenAI's limit."""
_ALL = "/v1/conversations"
_ONE = "/v1/conversations/{conversation_id}"
_ITEMS = f"{_ONE}/items"
_ITEM = f"{_ITEMS}/{{item_id}}"
_ERRORS = (400, 401, 404, 413, 415, 429, 500, 503)
Fields = Mapping[str, Any]

router = APIRouter(tags=["OpenAI"])


class CreateConversation(RequestModel):
    """Request schema for POST /v1/conversations."""

    items: list[InputItem] | None = Field(
        None, max_length=MAX_ITEMS, description="The first items of the conversation."
    )
    metadata: Metadata = Field(None, description="Up to 16 pairs of strings.")


class UpdateConversation(RequestModel):
    """Request schema for POST /v1/conversations/{conversation_id}."""

    metadata: Metadata = Field(description="Up to 16 pairs of strings, which replace all existing ones.")


class CreateItems(RequestModel):
    """Request schema for POST /v1/conversations/{conversation_id}/items."""

    items: list[InputItem] = Field(min_length=1, max_length=MAX_ITEMS, description="Items to add at the end.")


@dataclass(frozen=True, slots=True)
class _CheckedItems:
    """A validated body with items."""

    items: Sequence[Fields]
    metadata: Mapping[str, str]
    notices: Sequence[Notice]

    def answered(self, value: ConversationObject | ItemList) -> Response:
        """The response with this object and the warnings."""
        return json_response(replace(value, warnings=self.notices or UNSET), as_headers(self.notices))


@router.post(_ALL, responses=answers(ConversationObject, *_ERRORS), openapi_extra=takes(CreateConversation))
async def create_conversation(request: Request, services: ServicesDep) -> Response:
    """Create a conversation."""
    checked = await _checked(CreateConversation, request, services)
    client = record_of(request).client
    made = ConversationObject(id=f"conv_{uuid.uuid4().hex}", created_at=int(time.time()), metadata=checked.metadata)

    def keep(rows: Rows) -> None:
        store.keep_conversation(rows, to_builtins(made), client)
        store.append(rows, made.id, checked.items, client)

    await services.storage.run(keep)
    return checked.answered(made)


@router.get(_ONE, responses=answers(ConversationObject, *_ERRORS))
async def retrieve_conversation(conversation_id: str, request: Request, services: ServicesDep) -> Response:
    """Retrieve a conversation, without its items."""
    client = record_of(request).client
    return json_response(
        await services.storage.run(lambda rows: store.find_conversation(rows, conversation_id, client))
    )


@router.post(_ONE, responses=answers(ConversationObject, *_ERRORS), openapi_extra=takes(UpdateConversation))
async def update_conversation(conversation_id: str, request: Request, services: ServicesDep) -> Response:
    """Replace the metadata of a conversation."""
    client = record_of(request).client
    asked = await body_as(UpdateConversation, request, services)

    def change(rows: Rows) -> Fields:
        changed = {**store.find_conversation(rows, conversation_id, client), "metadata": asked.metadata or {}}
        store.keep_conversation(rows, changed, client)
        return changed

    return json_response(await services.storage.run(change))


@router.delete(_ONE, responses=answers(Deleted, *_ERRORS))
async def delete_conversation(conversation_id: str, request: Request, services: ServicesDep) -> Response:
    """Delete a conversation and its items. Its responses stay."""
    client = record_of(request).client
    await services.storage.run(lambda rows: store.delete_conversation(rows, conversation_id, client))
    return json_response(Deleted(id=conversation_id, object="conversation.deleted"))


@router.post(_ITEMS, responses=answers(ItemList, *_ERRORS), openapi_extra=takes(CreateItems))
async def create_items(conversation_id: str, request: Request, services: ServicesDep) -> Response:
    """Add items to a conversation."""
    checked = await _checked(CreateItems, request, services)
    client = record_of(request).client

    def add(rows: Rows) -> Sequence[Fields]:
        store.find_conversation(rows, conversation_id, client)
        return store.append(rows, conversation_id, checked.items, client)

    return checked.answered(_listed(await services.storage.run(add)))


@router.get(_ITEMS, responses=answers(ItemList, *_ERRORS))
async def list_items(conversation_id: str, request: Request, services: ServicesDep) -> Response:
    """List the items of a conversation, a page at a time."""
    client = record_of(request).client
    asked = query_of(ItemsQuery, request)
    return json_response(
        await services.storage.run(lambda rows: store.conversation_page(rows, conversation_id, client, asked))
    )


@router.get(_ITEM, responses=documented_errors(*_ERRORS))
async def retrieve_item(conversation_id: str, item_id: str, request: Request, services: ServicesDep) -> Response:
    """Retrieve an item of a conversation."""
    client = record_of(request).client
    return json_response(
        await services.storage.run(lambda rows: store.conversation_item(rows, conversation_id, item_id, client))
    )


@router.delete(_ITEM, responses=answers(ConversationObject, *_ERRORS))
async def delete_item(conversation_id: str, item_id: str, request: Request, services: ServicesDep) -> Response:
    """Delete an item of a conversation, and return the conversation."""
    client = record_of(request).client
    return json_response(
        await services.storage.run(lambda rows: store.delete_conversation_item(rows, conversation_id, item_id, client))
    )


def _listed(items: Sequence[Fields]) -> ItemList:
    return ItemList(data=items, first_id=items[0]["id"], last_id=items[-1]["id"])


def check_items(
    context: BodyContext,
    body: bytes,
    meta: RequestMeta,
    found: Lookup,
    schema: type[CreateConversation] | type[CreateItems],
) -> _CheckedItems:
    """Validate a body with items. Raises ApiError."""
    asked = context.validated(schema, body)
    stored = parsed(found)
    notices = to_report(asked.ignored(), strict=context.settings.strict)
    items = input_items(asked.items, stored, meta.answer_id.partition("_")[2])
    return _CheckedItems(items, (asked.metadata if isinstance(asked, CreateConversation) else None) or {}, notices)


async def _checked(
    schema: type[CreateConversation] | type[CreateItems], request: Request, services: Services
) -> _CheckedItems:
    incoming = await incoming_body(request, services, ItemNames)
    checked: _CheckedItems = await incoming.check(check_items, services, None, schema)
    return checked


DIALECT = Dialect(router, requests={_ALL: CreateConversation, _ONE: UpdateConversation, _ITEMS: CreateItems})
