"""Stored objects that a body refers to. They are found first, so that one pass can check all of the body."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from server.api.responses import store
from server.api.responses.store import Found, References
from server.api.responses.websocket import Lane, lane_of
from server.api.services import Services
from server.errors import InvalidRequestError
from server.http.middleware import record_of, sender_of
from server.telemetry.request_trace import Sender

_T = TypeVar("_T")
Lookup = Found | InvalidRequestError
"""The objects that a body refers to, or the error of the first that does not exist."""


class _Item(msgspec.Struct):
    id: str | None = None
    type: str | None = None
    role: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_reference(self) -> bool:
        return self.type == "item_reference" or (self.type is None and self.role is msgspec.UNSET)


class _ConversationRef(msgspec.Struct):
    id: str


class Names(msgspec.Struct):
    """The fields of a body that refer to stored objects; all others are skipped, so that reading them is quick."""

    def references(self) -> References:
        """What these fields refer to."""
        return References()


class ItemNames(Names):
    """The fields of CreateConversation and CreateItems that refer to stored objects."""

    items: list[_Item] | None = None

    def references(self) -> References:
        return References(items=_referenced(self.items))


class CompactNames(Names):
    """The fields of CompactResponse that refer to stored objects."""

    input: str | list[_Item] | None = None
    previous_response_id: str | None = None

    def references(self) -> References:
        return References(response=self.previous_response_id, items=_referenced(self.input))


class ResponseNames(CompactNames):
    """The fields of CreateResponse and CountInputTokens that refer to stored objects."""

    conversation: str | _ConversationRef | None = None

    def references(self) -> References:
        named = self.conversation
        conversation = named.id if isinstance(named, _ConversationRef) else named
        return References(self.previous_response_id, conversation, _referenced(self.input))


def references_in(body: bytes, names: type[Names]) -> References:
    """The references in a body with these fields. A malformed body has none: it is refused when it is checked."""
    try:
        return msgspec.json.decode(body, type=names).references()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return References()


def _referenced(items: str | Sequence[_Item] | None) -> Sequence[str]:
    if items is None or isinstance(items, str):
        return ()
    return [item.id for item in items if item.is_reference and item.id is not None]


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored objects that a body refers to, parsed."""

    context: Sequence[Mapping[str, Any]] = ()
    """The items of the conversation so far."""
    items: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The items that are referred to one by one, by their ids."""


def parsed(found: Lookup) -> Stored:
    """Parse what was found. Raises InvalidRequestError if the lookup did; errors of the body itself come first."""
    if isinstance(found, InvalidRequestError):
        raise found
    context = [json.loads(bytes(item)) for item in found.context]
    return Stored(context, {name: json.loads(bytes(item)) for name, item in found.items.items()})


@dataclass(frozen=True, slots=True)
class Occasion:
    """A request for a response, without its body."""

    answer_id: str
    client: str
    created: int
    """Unix time in seconds."""
    sender: Sender
    """The sender of the body, for Intake.run."""
    seed: int | None = None
    """The seed that was drawn when this body was first checked, if it has none of its own."""
    is_event: bool = False
    """Whether the body is an event of a websocket."""


@dataclass(frozen=True, slots=True)
class IncomingBody:
    """A body that can be checked without looking anything up."""

    body: bytes
    occasion: Occasion
    found: Lookup

    @property
    def context(self) -> Sequence[msgspec.Raw]:
        """The items of the conversation so far, as they are stored."""
        return () if isinstance(self.found, InvalidRequestError) else self.found.context

    async def check(self, work: Callable[..., _T], services: Services, *args: Any) -> _T:
        """Return what `work` makes of the body, the occasion, what was found, and these arguments. Raises ApiError."""
        num_bytes = len(self.body) + (0 if isinstance(self.found, InvalidRequestError) else self.found.num_bytes)
        return await services.body_worker.run(
            work,
            self.body,
            services.info(),
            self.occasion,
            self.found,
            *args,
            sender=self.occasion.sender,
            num_bytes=num_bytes,
        )


async def incoming_body(request: Request, services: Services, names: type[Names]) -> IncomingBody:
    """Read the body of a request and find what it refers to in these fields. Raises ApiError and ClientDisconnect."""
    body = await services.bodies.read_json(request)
    client, lane = record_of(request).client, lane_of(request)
    answer_id = f"resp_{uuid.uuid4().hex}"
    occasion = Occasion(answer_id, client, int(time.time()), sender_of(request), is_event=lane is not None)
    references = references_in(body, names)
    try:
        return IncomingBody(body, occasion, await _found(references, client, services, lane))
    except InvalidRequestError as error:
        return IncomingBody(body, occasion, error)


async def _found(references: References, client: str, services: Services, lane: Lane | None) -> Found:
    """Find the referenced objects, in the connection's memory first. Raises ApiError."""
    remembered = None if lane is None or references.response is None else lane.memory.find(references.response)
    rest = references if remembered is None else replace(references, response=None)
    found = await services.storage.run(lambda rows: store.find(rows, rest, client)) if rest else Found()
    if remembered is None:
        return found
    return replace(found, context=remembered, num_bytes=found.num_bytes + sum(map(len, remembered)))
