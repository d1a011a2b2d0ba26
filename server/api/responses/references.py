"""Stored objects that a body refers to. They are looked up first, so that one pass can validate the whole body."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from model_runner.runner_interface import RunnerInfo
from server.api.image_files import uploaded_files
from server.api.model_services import ModelServices
from server.api.responses import store
from server.api.responses.store import Found, References
from server.api.responses.websocket import Lane, lane_of
from server.api.services import Services
from server.errors import InvalidRequestError
from server.generation.sent_images import UploadedFile
from server.http.middleware import record_of, sender_of
from server.telemetry.request_trace import RequestTrace, Sender

_T = TypeVar("_T")
Lookup = Found | InvalidRequestError
"""The stored objects that a body refers to, or the error for the first that does not exist."""


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
    """The fields of a body that refer to stored objects. Other fields are skipped, which makes decoding fast."""

    def references(self) -> References:
        """The ids in these fields."""
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
    """The references in a body with these fields. A malformed body has none, and is refused by its validation."""
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
    """Parsed stored objects that a body refers to."""

    context: Sequence[Mapping[str, Any]] = ()
    """The items of the conversation so far."""
    items: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Single items that the body refers to, by id."""


def parsed(found: Lookup) -> Stored:
    """Parse the found objects. Raises the error of a failed lookup; call it after validating the body itself."""
    if isinstance(found, InvalidRequestError):
        raise found
    context = [json.loads(bytes(item)) for item in found.context]
    return Stored(context, {name: json.loads(bytes(item)) for name, item in found.items.items()})


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """Metadata of a request for a response: everything except its body."""

    answer_id: str
    client: str
    created: int
    """Unix time in seconds."""
    sender: Sender
    """The sender of the body, for BodyWorker.run."""
    seed: int | None = None
    """The seed that was drawn when this body was first planned, if the body has none."""
    is_event: bool = False
    """Whether the body is an event of a websocket."""


@dataclass(frozen=True, slots=True)
class IncomingBody:
    """A body with the stored objects that it refers to, ready to be validated."""

    body: bytes
    meta: RequestMeta
    found: Lookup
    files: Mapping[str, UploadedFile] = field(default_factory=dict)
    """Images that are known before the body is checked, by file ids and URLs."""

    @property
    def context(self) -> Sequence[msgspec.Raw]:
        """The items of the conversation so far, in stored form."""
        return () if isinstance(self.found, InvalidRequestError) else self.found.context

    def served(self, services: Services, record: RequestTrace) -> ModelServices:
        """The model that the body names. Raises NotFoundError."""
        served = services.models_of(self.meta.client).of_body(self.body)
        record.model = served.model.name
        return served

    async def check(
        self,
        work: Callable[..., _T],
        services: Services,
        served: ModelServices | None,
        *args: Any,
        info: RunnerInfo | None = None,
    ) -> _T:
        """Run `work(context, body, meta, found, *args)` in the body worker, by default with the engine's info.

        `served` is None for work without a model.
        Raises ApiError.
        """
        if served is not None and info is None:
            info = served.info()
        served = served or next(iter(services.models))
        num_bytes = len(self.body) + (0 if isinstance(self.found, InvalidRequestError) else self.found.num_bytes)
        uploaded = await uploaded_files([self.body, *map(bytes, self.context)], self.meta.client, services, served)
        return await served.body_worker.run(
            work,
            self.body,
            info,
            self.meta,
            self.found,
            *args,
            sender=self.meta.sender,
            num_bytes=num_bytes,
            files={**uploaded, **self.files},
        )


async def incoming_body(request: Request, services: Services, names: type[Names]) -> IncomingBody:
    """Read a request's body, and look up the objects that these fields refer to. Raises ApiError, ClientDisconnect."""
    body = await services.bodies.read_json(request)
    client, lane = record_of(request).client, lane_of(request)
    answer_id = f"resp_{uuid.uuid4().hex}"
    meta = RequestMeta(answer_id, client, int(time.time()), sender_of(request), is_event=lane is not None)
    references = references_in(body, names)
    try:
        return IncomingBody(body, meta, await _found(references, client, services, lane))
    except InvalidRequestError as error:
        return IncomingBody(body, meta, error)


async def _found(references: References, client: str, services: Services, lane: Lane | None) -> Found:
    """Find the referenced objects, in the connection's memory first. Raises ApiError."""
    remembered = None if lane is None or references.response is None else lane.memory.find(references.response)
    rest = references if remembered is None else replace(references, response=None)
    found = await services.storage.run(lambda rows: store.find(rows, rest, client)) if rest else Found()
    if remembered is None:
        return found
    return replace(found, context=remembered, num_bytes=found.num_bytes + sum(map(len, remembered)))
