"""What the body of a response asks for, after the conversation that it goes on from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from pydantic import TypeAdapter

from server.api.fields.generation import generation_fields
from server.api.responses.history import History
from server.api.responses.items import AdditionalToolsItem, InputItem, ReferenceItem
from server.api.responses.schema import CompactResponse, CreateResponse, InputFields, WindowFields
from server.api.responses.tools import Offer, QualifiedName, tool_use
from server.errors import InvalidRequestError
from server.generation.request import Conversation, GenerationRequest

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
_PATHS = {
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "thinking_budget": "thinking_token_budget",
    "reasoning_effort": "reasoning.effort",
    "thinking": "reasoning.effort",
    "messages[].role": "input",
    "messages[].tool_calls[].function.arguments": "input[].arguments",
}
"""What the pipeline's names are here."""
_SUMMARIZE = (
    "Summarize this conversation, so that it can go on from your summary alone: what was asked for, what was decided "
    "and found out, and what is still to be done. Answer with nothing but the summary."
)


@dataclass(frozen=True, slots=True)
class References:
    """What a body names that is stored."""

    response: str | None
    conversation: str | None
    items: Sequence[str] = ()

    def __bool__(self) -> bool:
        return self.response is not None or self.conversation is not None or bool(self.items)


@dataclass(frozen=True, slots=True)
class Stored:
    """What was found for them, when it is read."""

    context: Sequence[Mapping[str, Any]] = ()
    """The items of the conversation so far."""
    items: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Those that are named one by one, by their ids."""


@dataclass(frozen=True, slots=True)
class Found:
    """The same in JSON, as it lies in the storage: it is read where bodies are taken in, and keeps nobody waiting."""

    context: Sequence[msgspec.Raw]
    items: Mapping[str, msgspec.Raw]
    num_bytes: int
    """Of all this."""


def stored_of(found: Found | None) -> Stored:
    """What it says; nothing if nothing was looked for."""
    if found is None:
        return Stored()
    context = [json.loads(bytes(item)) for item in found.context]
    return Stored(context, {name: json.loads(bytes(item)) for name, item in found.items.items()})


def references_of(body: WindowFields) -> References:
    """What the body names that is stored."""
    given = () if isinstance(body.input, str) else body.input or ()
    ids = [item.id for item in given if isinstance(item, ReferenceItem)]
    return References(body.previous_response_id, body.conversation_id, ids)


def history_of(body: WindowFields, stored: Stored, offer: Offer) -> History:
    """The messages of the conversation; adds the tools that its items have to the offer.

    Raises InvalidRequestError if there is nothing in it.
    """
    items = [*_earlier(body, stored), *_given(body, stored)]
    for path, item in items:
        if isinstance(item, AdditionalToolsItem):
            offer.add(item.tools, f"{path}.tools")
    history = History(offer)
    if body.instructions is not None:
        history.add_text("system", body.instructions)
    history.add(items)
    if isinstance(body.input, str):
        history.add_text("user", body.input)
    if not history.messages:
        message = "Invalid 'input': there is no message in it, and nothing else that the model could answer."
        raise InvalidRequestError(message, param="input", code="empty_array")
    return history


def conversation_of(history: History, body: InputFields, offer: Offer, variables: Mapping[str, Any]) -> Conversation:
    """The conversation as the model is to see it."""
    effort = None if body.reasoning is None else body.reasoning.effort
    shows_tools = body.tool_choice != "none"
    return Conversation(
        messages=tuple(history.messages),
        tools=tuple(tool.for_template() for tool in offer.tools) if shows_tools else (),
        variables=variables,
        effort=effort,
    )


def paths_of(history: History) -> dict[str, str]:
    """What the pipeline's names are here."""
    return {**_PATHS, **history.paths}


def offer_of(body: InputFields) -> Offer:
    """The tools of the body."""
    offer = Offer()
    offer.add(body.tools or (), "tools")
    return offer


def response_intent(
    body: CreateResponse, stored: Stored, answer_id: str
) -> tuple[GenerationRequest, Mapping[str, QualifiedName]]:
    """The body's fields as a request, and what the client calls the tools, by the model's names for them."""
    offer = offer_of(body)
    history = history_of(body, stored, offer)
    wants_logprobs = "message.output_text.logprobs" in body.includes or bool(body.top_logprobs)
    conversation = conversation_of(history, body, offer, body.chat_template_kwargs or {})
    request = GenerationRequest(
        **generation_fields(body, paths_of(history), body.constraint),
        id=answer_id,
        prompts=(replace(conversation, drops_oldest=body.truncation == "auto"),),
        tools=tool_use(offer, body.tool_choice, is_parallel=body.parallel_tool_calls is not False),
        thinking_budget=body.thinking_token_budget,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
    )
    return request, offer.names


def compact_intent(body: CompactResponse, stored: Stored, answer_id: str) -> GenerationRequest:
    """The request for a summary of the conversation."""
    history = history_of(body, stored, Offer())
    history.add_text("user", _SUMMARIZE)
    return GenerationRequest(
        model=body.model,
        id=answer_id,
        prompts=(Conversation(messages=tuple(history.messages)),),
        paths=paths_of(history),
        notices=tuple(body.left_out()),
    )


def _earlier(body: WindowFields, stored: Stored) -> list[tuple[str, InputItem]]:
    path = "previous_response_id" if body.conversation_id is None else "conversation"
    return [(path, item) for item in _ITEMS.validate_python(list(stored.context))]


def _given(body: WindowFields, stored: Stored) -> list[tuple[str, InputItem]]:
    given = [] if isinstance(body.input, str) else body.input or []
    paths = [f"input[{index}]" for index in range(len(given))]
    found = [
        _ITEMS.validate_python([stored.items[item.id]])[0] if isinstance(item, ReferenceItem) else item
        for item in given
    ]
    return list(zip(paths, found, strict=True))
