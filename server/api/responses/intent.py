"""Converts a body to a plan: items become messages, fields a generation request. Runs in the body worker."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET
from pydantic import TypeAdapter

from server.api.body_worker import BodyContext
from server.api.dialect import refused_constraints
from server.api.fields.generation import generation_fields
from server.api.fields.images import data_url
from server.api.fields.messages import arguments_of, thoughts_of
from server.api.responses.items import (
    AdditionalToolsItem,
    CallOutputItem,
    CompactionItem,
    CustomCallItem,
    FunctionCallItem,
    HostedItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    ReferenceItem,
    content_of,
)
from server.api.responses.objects import InputTokens
from server.api.responses.references import Lookup, RequestMeta, Stored, parsed
from server.api.responses.response_builder import ResponseFields, response_fields
from server.api.responses.schema import (
    CompactResponse,
    CountInputTokens,
    CreateEvent,
    CreateResponse,
    HistoryFields,
    InputFields,
)
from server.api.responses.store import Origin
from server.api.responses.tools import OfferedTools, QualifiedName, tool_use
from server.errors import InvalidRequestError, shorten
from server.generation.notices import as_headers
from server.generation.planning.plan import Plan
from server.generation.request import Conversation, GenerationRequest
from server.generation.sent_images import SentImages, UploadedFile
from server.generation.tools import CUSTOM_INPUT
from server.text.chat_template import Clock, at_second

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
_PATHS = {
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "thinking": "reasoning.effort",
    "messages[].role": "input",
    "messages[].tool_calls[].function.arguments": "input[].arguments",
}
"""This API's names for the pipeline's fields."""
_WITH_OTHER_NAMES = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "thinking_budget": "thinking_token_budget",
}
"""This API's names for fields that other servers give other names."""
_WITH_PARTS = ("content", "output")
"""The keys of items that may have images."""
_SUMMARIZE = (
    "Summarize this conversation, so that it can go on from your summary alone: what was asked for, what was decided "
    "and found out, and what is still to be done. Answer with nothing but the summary."
)
_SUMMARY = "Summary of the conversation so far:\n\n{summary}"


@dataclass(frozen=True, slots=True)
class PlannedResponse:
    """A validated and planned request for a response."""

    plan: Plan
    fields: ResponseFields
    origin: Origin
    is_background: bool
    files: Mapping[str, UploadedFile]
    """For a background response: the images that the body names, by file ids and URLs."""


def plan_response(context: BodyContext, body: bytes, meta: RequestMeta, found: Lookup) -> PlannedResponse:
    """Validate a body and plan its response. Raises ApiError."""
    asked = context.validated(CreateEvent if meta.is_event else CreateResponse, body)
    stored = parsed(found)
    with refused_constraints():
        request, names = _response_request(asked, stored, meta)
        plan = context.planner().plan(request)
    is_kept = asked.is_stored or asked.conversation_id is not None or meta.is_event
    items = input_items(asked.input, stored, meta.answer_id.partition("_")[2]) if is_kept else ()
    items = [_with_fetched(item, context.files) for item in items]
    origin = Origin(meta.client, items, asked.conversation_id, asked.is_stored)
    is_background = bool(asked.background)
    files = context.files if is_background else {}
    return PlannedResponse(plan, response_fields(asked, plan, names, meta.created), origin, is_background, files)


def count_tokens(
    context: BodyContext, body: bytes, meta: RequestMeta, found: Lookup
) -> tuple[InputTokens, dict[str, str]]:
    """Count the tokens of an input; returns the answer and its headers. Raises ApiError."""
    asked = context.validated(CountInputTokens, body)
    stored, offer = parsed(found), _offer_of(asked)
    history = _history_of(asked, stored, offer)
    tool_use(offer, asked.tool_choice, is_parallel=asked.parallel_tool_calls is not False)
    request = GenerationRequest(
        model=asked.model,
        prompts=(_conversation_of(history, asked, offer, {}),),
        paths=_paths_of(history),
        notices=tuple(asked.ignored()),
    )
    num_tokens, notices = context.planner().count(request)
    return InputTokens(input_tokens=num_tokens, warnings=notices or UNSET), as_headers(notices)


def plan_compaction(context: BodyContext, body: bytes, meta: RequestMeta, found: Lookup) -> Plan:
    """Plan the summary of a conversation. Raises ApiError."""
    asked = context.validated(CompactResponse, body)
    history = _history_of(asked, parsed(found), OfferedTools())
    history.add_text("user", _SUMMARIZE)
    request = GenerationRequest(
        model=asked.model,
        id=meta.answer_id,
        prompts=(Conversation(messages=tuple(history.messages), images=history.images.all),),
        paths=_paths_of(history),
        notices=tuple(asked.ignored()),
    )
    with refused_constraints():
        return context.planner().plan(request)


def input_items(given: str | Sequence[InputItem] | None, stored: Stored, suffix: str) -> Sequence[Mapping[str, Any]]:
    """The items of an input in stored form, each with a unique id."""
    items: dict[str, Mapping[str, Any]] = {}
    for index, item in enumerate(_sent(given)):
        fields = stored.items[item.id] if isinstance(item, ReferenceItem) else item.model_dump(exclude_unset=True)
        made = f"item_{suffix}{index:02x}"
        own = fields.get("id") or made
        item_id = made if own in items else own
        items[item_id] = _as_stored({**fields, "id": item_id})
    return list(items.values())


def _as_stored(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item in stored form: with its type and a status, and with its content in parts."""
    kind = item.get("type") or "message"
    stored = {**item, "type": kind}
    if kind == "message" and isinstance(item.get("content", ""), str):
        of_assistant = {"type": "output_text", "annotations": []}
        part = of_assistant if item["role"] == "assistant" else {"type": "input_text"}
        stored["content"] = [{**part, "text": item.get("content", "")}]
    if kind != "reasoning":
        stored["status"] = item.get("status") or "completed"
    return stored


def _with_fetched(item: Mapping[str, Any], files: Mapping[str, UploadedFile]) -> Mapping[str, Any]:
    """An item with the fetched images in place of their URLs, which may show something else later."""
    lists = {key: item[key] for key in _WITH_PARTS if isinstance(item.get(key), list)}
    return {**item, **{key: [_inlined(part, files) for part in parts] for key, parts in lists.items()}}


def _inlined(part: Any, files: Mapping[str, UploadedFile]) -> Any:
    fetched = files.get(part.get("image_url") or "") if isinstance(part, dict) else None
    return part if fetched is None else {**part, "image_url": data_url(fetched.content)}


def _response_request(
    body: CreateResponse, stored: Stored, meta: RequestMeta
) -> tuple[GenerationRequest, Mapping[str, QualifiedName]]:
    """The generation request of a body, and the client's names of the tools by the model's names."""
    offer = _offer_of(body)
    history = _history_of(body, stored, offer)
    renamed = {name: body.named_value(own) for name, own in _WITH_OTHER_NAMES.items()}
    top_logprobs = renamed["logprobs"][1] or 0
    wants_logprobs = "message.output_text.logprobs" in body.includes or top_logprobs > 0
    conversation = _conversation_of(history, body, offer, body.chat_template_kwargs or {})
    clock = Clock(at_second(meta.created))  # the same if a restart generates it again
    request = GenerationRequest(
        **generation_fields(
            body, {**_paths_of(history), **{name: path for name, (path, _) in renamed.items()}}, body.constraint
        ),
        id=meta.answer_id,
        prompts=(replace(conversation, drops_oldest=body.truncation == "auto", clock=clock),),
        tools=tool_use(offer, body.tool_choice, is_parallel=body.parallel_tool_calls is not False),
        thinking_budget=renamed["thinking_budget"][1],
        max_tokens=renamed["max_tokens"][1],
        logprobs=top_logprobs if wants_logprobs else None,
        is_held=True,  # the last event has the whole response
    )
    if request.seed is None:
        request = replace(request, seed=meta.seed)
    if meta.is_event:
        request = replace(request, stream=True)
    if isinstance(body, CreateEvent) and body.generate is False:
        request = replace(request, max_tokens=0)
    return request, offer.names


def _offer_of(body: InputFields) -> OfferedTools:
    offer = OfferedTools()
    offer.add(body.tools or (), "tools")
    return offer


def _conversation_of(
    history: "History", body: InputFields, offer: OfferedTools, variables: Mapping[str, Any]
) -> Conversation:
    may_call = body.tool_choice != "none"
    return Conversation(
        messages=tuple(history.messages),
        images=history.images.all,
        tools=body.shown(offer.tools, are_callable=may_call),
        may_call=may_call,
        variables=variables,
        effort=None if body.reasoning is None else body.reasoning.effort,
    )


def _paths_of(history: "History") -> dict[str, str]:
    return {**_PATHS, **history.paths}


def _history_of(body: HistoryFields, stored: Stored, offer: OfferedTools) -> "History":
    """The messages of the conversation. Tools in its items are added to `offer`.

    Raises InvalidRequestError if there is no message.
    """
    items = [*_earlier(body, stored), *_given(body, stored)]
    for path, item in items:
        if isinstance(item, AdditionalToolsItem):
            offer.add(item.tools, f"{path}.tools")
    history = History(offer)
    if body.instructions is not None:
        history.add_text("system", body.instructions)
    history.add(items)
    if not history.messages:
        message = "Invalid 'input': it has no message, and nothing else that the model could answer."
        raise InvalidRequestError(message, param="input", code="empty_array")
    return history


def _earlier(body: HistoryFields, stored: Stored) -> list[tuple[str, InputItem]]:
    path = "previous_response_id" if body.conversation_id is None else "conversation"
    return [(path, item) for item in _ITEMS.validate_python(list(stored.context))]


def _given(body: HistoryFields, stored: Stored) -> list[tuple[str, InputItem]]:
    return [
        (
            f"input[{index}]",
            _ITEMS.validate_python([stored.items[item.id]])[0] if isinstance(item, ReferenceItem) else item,
        )
        for index, item in enumerate(_sent(body.input))
    ]


def _sent(given: str | Sequence[InputItem] | None) -> Sequence[InputItem]:
    """The items of an input; a text is a message of the user."""
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else given or ()


class History:
    """Messages for a chat template, built from items in order.

    Reasoning, text and calls in one turn of the assistant become one message, as in chat completions.
    """

    def __init__(self, offer: OfferedTools) -> None:
        """`offer` has the model's names of the tools."""
        self.messages: list[dict[str, Any]] = []
        self.paths: dict[str, str] = {}
        """Paths in the client's request of message parts that a template may not show."""
        self.images = SentImages()
        """The images of all messages."""
        self._offer = offer
        self._called: set[str] = set()
        """Ids of all calls so far."""
        self._is_open = False
        """Whether the last message is the assistant's and may get further parts."""

    def add_text(self, role: str, text: str) -> None:
        """Add a message that is not the assistant's."""
        self.messages.append({"role": role, "content": text})
        self._is_open = False

    def add(self, items: Iterable[tuple[str, InputItem]]) -> None:
        """Add items, given with their paths. Items that are not part of a conversation are skipped.

        Raises InvalidRequestError for the result of an unknown call, and for an image that cannot be read.
        """
        for path, item in items:
            match item:
                case MessageItem(role="assistant"):
                    self._add_reasoning(thoughts_of(item.content) or "", path)
                    self._turn(has="content")["content"] = content_of(item.content, self.images, f"{path}.content")
                case MessageItem():
                    self.add_text(item.role, content_of(item.content, self.images, f"{path}.content"))
                case ReasoningItem():
                    self._add_reasoning(item.text, path)
                case FunctionCallItem():
                    self._add_call(item, arguments_of(item.arguments))
                case CustomCallItem():
                    self._add_call(item, {CUSTOM_INPUT: item.input})
                case HostedItem():
                    self._called.add(item.call_id or "")
                case CallOutputItem():
                    self._check_called(item, path)
                    content = content_of(item.output, self.images, f"{path}.output")
                    self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
                    self._is_open = False
                case CompactionItem():
                    self.add_text("user", _SUMMARY.format(summary=item.summary))

    def _add_reasoning(self, text: str, path: str) -> None:
        if text:
            self._turn(has="reasoning_content")["reasoning_content"] = text
            self.paths[f"messages[{len(self.messages) - 1}].reasoning_content"] = path

    def _check_called(self, item: CallOutputItem, path: str) -> None:
        if item.call_id not in self._called:
            kind = item.type.removesuffix("_call_output").replace("_", " ")
            message = f"No tool call found for {kind} call output with call_id {shorten(item.call_id)}."
            raise InvalidRequestError(message, param=f"{path}.call_id", code="invalid_value")

    def _add_call(self, item: FunctionCallItem | CustomCallItem, arguments: object) -> None:
        self._called.add(item.call_id)
        name = self._offer.model_name(QualifiedName(item.name, item.namespace))
        call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn(has="").setdefault("tool_calls", []).append(call)

    def _turn(self, has: str) -> dict[str, Any]:
        """The assistant's message for a part of this kind. If later parts exist already, a new message begins."""
        parts = ("reasoning_content", "content", "tool_calls")
        later = parts[parts.index(has) :] if has else ()
        if not self._is_open or any(self.messages[-1].get(part) for part in later):
            self.messages.append({"role": "assistant", "content": ""})
            self._is_open = True
        return self.messages[-1]
