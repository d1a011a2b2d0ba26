"""From the body of a response to its plan, wherever bodies are taken in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from server.api.generation_api import refused_constraints
from server.api.intake import IntakeContext
from server.api.responses.event import CreateEvent
from server.api.responses.head import head_of
from server.api.responses.history import as_item
from server.api.responses.intent import Found, References, Stored, references_of, response_intent, stored_of
from server.api.responses.items import InputItem, ReferenceItem
from server.api.responses.schema import CreateResponse
from server.api.responses.store import Origin
from server.api.responses.telling import Head
from server.generation.planning.plan import Plan
from server.telemetry.request_trace import Sender


@dataclass(frozen=True, slots=True)
class Occasion:
    """What a request has beside its body."""

    answer_id: str
    client: str
    created: int
    """Unix time in seconds."""
    sender: Sender
    """Whom the body is from, for Intake.run."""
    seed: int | None = None
    """Of a request that was taken in before, and had none of its own."""
    is_event: bool = False
    """Whether the body is an event of a websocket."""


@dataclass(frozen=True, slots=True)
class TakenResponse:
    """A request that was taken in."""

    plan: Plan
    head: Head
    origin: Origin
    is_background: bool


def take_in_response(
    context: IntakeContext, body: bytes, occasion: Occasion, found: Found | None = None
) -> TakenResponse | References:
    """The plan for a body; or, if it names what is stored, and that is not given, the names. Raises ApiError."""
    asked = context.validated(CreateEvent if occasion.is_event else CreateResponse, body)
    references = references_of(asked)
    if references and found is None:
        return references
    stored = stored_of(found)
    with refused_constraints():
        request, names = response_intent(asked, stored, occasion.answer_id)
        if request.seed is None:
            request = replace(request, seed=occasion.seed)
        if occasion.is_event:
            request = replace(request, stream=True)
        if isinstance(asked, CreateEvent) and asked.generate is False:
            request = replace(request, max_tokens=0)
        plan = context.planner().plan(request)
    head = head_of(asked, plan, names, occasion.created)
    keeps = asked.is_stored or references.conversation is not None or occasion.is_event
    items = input_items(asked.input, stored, occasion.answer_id.partition("_")[2]) if keeps else ()
    origin = Origin(occasion.client, items, references.conversation, asked.is_stored)
    return TakenResponse(plan, head, origin, bool(asked.background))


def input_items(given: str | Sequence[InputItem] | None, stored: Stored, suffix: str) -> Sequence[Mapping[str, Any]]:
    """The items of an input as they are stored, each with an id of its own."""
    sent: Sequence[Mapping[str, Any]]
    if isinstance(given, str):
        sent = [{"role": "user", "content": given}]
    else:
        sent = [
            stored.items[item.id] if isinstance(item, ReferenceItem) else item.model_dump(exclude_unset=True)
            for item in given or ()
        ]
    items: dict[str, Mapping[str, Any]] = {}
    for index, item in enumerate(sent):
        made = f"item_{suffix}{index:02x}"
        own = item.get("id") or made
        item_id = made if own in items else own
        items[item_id] = as_item({**item, "id": item_id})
    return list(items.values())
