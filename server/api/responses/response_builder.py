"""Builds responses: the object, its output items, and the numbered events of its stream.

Whole and streamed answers are built by the same code, so that they cannot differ.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from server.api.fields.rules import RequestModel
from server.api.fields.structured import JsonObjectFormat
from server.api.openai.logprobs import TokenLogprob, chat_logprobs
from server.api.responses.items import seal
from server.api.responses.objects import (
    CompactedItem,
    Compaction,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputCustomCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputPart,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningSettings,
    ReasoningText,
    ResponseConversation,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
    SummaryText,
    TextSettings,
)
from server.api.responses.schema import CreateResponse, JsonSchemaFormat, TextConfig
from server.api.responses.tools import HostedTool, QualifiedName, as_sent
from server.errors import ApiError, InvalidRequestError, RateLimitError
from server.generation.events import (
    ChoiceEnd,
    Delta,
    Event,
    OutputToken,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
    Usage,
)
from server.generation.notices import Notice, as_headers
from server.generation.planning.plan import Plan
from server.generation.result import WholeChoice
from server.http.event_stream import ascii_json
from server.text.tokenizer import Tokenizer

EventFields = dict[str, Any]
"""The properties of a ResponseEvent; its number is added last."""


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The format of the output."""

    names: Mapping[str, QualifiedName]
    """The client's names of the tools, by the model's names."""
    logprobs: bool
    summarizes: bool
    """Whether reasoning is returned as a summary."""
    seals: bool
    """Whether reasoning is also returned sealed."""


@dataclass(frozen=True, slots=True)
class ResponseFields:
    """The initial state of a response. Plain data."""

    begun: ResponseObject
    """The response's initial object, without the fingerprint."""
    form: OutputForm
    generates: bool
    """Whether the request allows any output."""


def response_fields(
    body: CreateResponse, plan: Plan, names: Mapping[str, QualifiedName], created: int
) -> ResponseFields:
    """The initial response to a body, with its effective settings. `created` is a Unix time in seconds."""
    sampling = plan.requests[0].sampling
    reasoning = body.reasoning
    begun = ResponseObject(
        id=plan.id,
        created_at=created,
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        conversation=UNSET if body.conversation_id is None else ResponseConversation(id=body.conversation_id),
        instructions=body.instructions,
        max_output_tokens=body.named_value("max_output_tokens")[1],
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=plan.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningSettings(
            effort=None if reasoning is None else reasoning.effort,
            summary=None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        ),
        safety_identifier=body.safety_identifier,
        store=body.is_stored,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        text=_text(body.text),
        tool_choice=_plain(body.tool_choice) or "auto",
        tools=[_tool(tool) for tool in body.tools or () if not isinstance(tool, HostedTool)],
        top_logprobs=body.named_value("top_logprobs")[1] or 0,
        truncation=body.truncation or "disabled",
        user=UNSET if body.user is None else body.user,
        seed=plan.seed,
        template_date=plan.template_date or UNSET,
        verification=UNSET if plan.verification == "match" else plan.verification,
        warnings=plan.notices or UNSET,
    )
    form = OutputForm(
        names=names,
        logprobs=sampling.logprobs is not None,
        summarizes=reasoning is not None and reasoning.is_summarized,
        seals="reasoning.encrypted_content" in body.includes,
    )
    return ResponseFields(begun, form, generates=plan.requests[0].max_tokens > 0)


def _text(asked: TextConfig | None) -> TextSettings:
    form = None if asked is None else asked.format
    described: dict[str, Any] = {"type": "text"}
    match form:
        case JsonSchemaFormat():
            described = {
                "type": "json_schema",
                "name": form.name,
                "description": form.description,
                "schema": form.schema_,
                "strict": bool(form.strict),
            }
        case JsonObjectFormat():
            described = {"type": "json_object"}
    return TextSettings(format=described, verbosity=(asked and asked.verbosity) or UNSET)


def _tool(tool: RequestModel) -> Any:
    """A tool as it was sent; functions get all properties that OpenAI's schema requires."""
    sent = _plain(tool)
    required = {"description": None, "parameters": None, "strict": False}
    return {**required, **sent} if sent["type"] == "function" else sent


def _plain(value: object) -> Any:
    return value.model_dump(exclude_none=True, by_alias=True) if isinstance(value, RequestModel) else value


class ResponseBuilder:
    """Builds a response from the events of its run, and yields the events of its stream."""

    def __init__(self, fields: ResponseFields, fingerprint: str, tokenizer: Tokenizer) -> None:
        self.output = Output(fields.begun.id, fields.form, tokenizer)
        self.has_begun = False
        self.late_notices: list[Notice] = []
        """Warnings that were added after the response had begun."""
        self._response = replace(fields.begun, system_fingerprint=fingerprint)
        self._generates = fields.generates
        self._has_started = False
        self._is_cut = False
        self._number = 0

    @property
    def status(self) -> ResponseStatus:
        """The status of the response."""
        return self._response.status

    def response(self) -> ResponseObject:
        """The current object."""
        return replace(self._response, output=tuple(self.output.items))

    def begin(self) -> Iterator[ResponseEvent]:
        """Announce the response, once."""
        if self.has_begun:
            return
        self.has_begun = True
        yield self._with_response("response.created")
        if self.status == "queued":
            yield self._with_response("response.queued")

    def start(self) -> Iterator[ResponseEvent]:
        """Announce that generation has started, once."""
        yield from self.begin()
        if not self._has_started:
            self._has_started = True
            self._response = replace(self._response, status="in_progress")
            yield self._with_response("response.in_progress")

    def add(self, event: Event) -> Iterator[ResponseEvent]:
        """Add an event of the run."""
        yield from self.start()
        if isinstance(event, ChoiceEnd) and self._generates:
            self._is_cut = event.reason == "length"
            yield from self._numbered(self.output.end_all(is_cut=self._is_cut))
        elif not isinstance(event, ChoiceEnd):
            yield from self._numbered(self.output.add(event))

    def end(self, usage: Usage) -> Iterator[ResponseEvent]:
        """End the response after its run."""
        used = response_usage(usage)
        if self._is_cut:
            yield from self._ended("incomplete", usage=used, incomplete_details=IncompleteDetails())
        else:
            yield from self._ended("completed", usage=used, completed_at=int(time.time()))

    def fail(self, error: ApiError) -> Iterator[ResponseEvent]:
        """End the response with an error."""
        yield from self._ended("failed", error=response_failure(error))

    def cancel(self) -> Iterator[ResponseEvent]:
        """End the response as cancelled."""
        yield from self._ended("cancelled")

    def lose(self, error: ApiError) -> None:
        """Turn a response that could not be stored into a failed one without output."""
        failure = ResponseFailure(code="server_error", message=error.message)
        self._response = replace(
            self._response, status="failed", error=failure, completed_at=None, incomplete_details=None
        )
        self.output.items.clear()

    def warn(self, *notices: Notice) -> None:
        """Add warnings after the response has begun."""
        self.late_notices += notices
        self._response = replace(self._response, warnings=[*(self._response.warnings or ()), *notices])

    def end_again(self) -> ResponseEvent:
        """The last event again, after the response has changed."""
        self._number -= 1
        return self._with_response(f"response.{self.status}")

    def _ended(self, status: ResponseStatus, **fields: Any) -> Iterator[ResponseEvent]:
        yield from self.start()
        yield from self._numbered(self.output.end("incomplete"))
        self._response = replace(self._response, status=status, **fields)
        yield self._with_response(f"response.{status}")

    def _with_response(self, kind: str) -> ResponseEvent:
        (event,) = self._numbered([{"type": kind, "response": self.response()}])
        return event

    def _numbered(self, events: Iterable[EventFields]) -> Iterator[ResponseEvent]:
        for event in events:
            yield ResponseEvent(sequence_number=self._number, **event)
            self._number += 1


def response_failure(error: ApiError) -> ResponseFailure:
    """The error of a failed response."""
    match error:
        case RateLimitError():
            return ResponseFailure(code="rate_limit_exceeded", message=error.message)
        case InvalidRequestError():
            return ResponseFailure(code="invalid_prompt", message=error.message)
    return ResponseFailure(code="server_error", message=error.message)


def response_usage(usage: Usage) -> ResponseUsage:
    """The usage of a response."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.cached_tokens, cache_write_tokens=usage.cache_written_tokens
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=usage.reasoning_tokens,
            accepted_prediction_tokens=usage.accepted_drafts,
            rejected_prediction_tokens=usage.rejected_drafts,
        ),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def compaction(plan: Plan, choice: WholeChoice, usage: Usage, created: int) -> tuple[Compaction, dict[str, str]]:
    """The answer of POST /v1/responses/compact, and its headers; `choice` is the summary.

    Raises InvalidRequestError if there is no summary.
    """
    if not choice.text.strip():
        message = (
            "Invalid 'input': the model generated no summary. The conversation may leave too little of the context."
        )
        raise InvalidRequestError(message, param="input", code="invalid_value")
    cut = [Notice("input", "Its summary was cut off at the end of the context.")]
    notices = [*plan.notices, *(cut if choice.finish_reason == "length" else [])]
    suffix = plan.id.partition("_")[2]
    answer = Compaction(
        id=plan.id,
        created_at=created,
        output=[CompactedItem(id=f"cmp_{suffix}", encrypted_content=seal(summary=choice.text))],
        usage=response_usage(usage),
        seed=plan.seed,
        warnings=notices or UNSET,
    )
    return answer, as_headers(notices)


class Output:
    """The growing output of a response: finished items, and the open one."""

    def __init__(self, response_id: str, form: OutputForm, tokenizer: Tokenizer) -> None:
        self.items: list[OutputItem] = []
        """The finished items."""
        self._suffix = response_id.partition("_")[2]
        self._form = form
        self._tokenizer = tokenizer
        self._open: _OpenItem | None = None

    def add(self, event: Delta) -> Iterator[EventFields]:
        """Add the next event of the run."""
        match event:
            case TextDelta(text="") if type(self._open) is not _Message:
                pass  # tokens that end a call or an empty answer
            case TextDelta():
                yield from self._in(_Message)
                yield from self._piece(event.text, self._logprobs(event.tokens))
            case ReasoningDelta():
                yield from self._in(_Summary if self._form.summarizes else _Reasoning)
                yield from self._piece(event.text)
            case ToolCallBegin():
                yield from self.end()
                kind = _CustomCall if event.is_custom else _FunctionCall
                yield from self._begin(kind, call_id=event.id, **as_sent(self._form.names, event.name))
            case ToolCallDelta():
                yield from self._piece(event.text)

    def end(self, status: ItemStatus = "completed") -> Iterator[EventFields]:
        """Finish the open item, if there is one, with this status."""
        if self._open is None:
            return
        ended, self._open = self._open, None
        yield from ended.end()
        item = ended.item(status)
        self.items.append(item)
        yield {"type": "response.output_item.done", "output_index": ended.index, "item": item}

    def end_all(self, *, is_cut: bool) -> Iterator[EventFields]:
        """Finish the output, which is complete or was cut off. An empty answer becomes an empty message."""
        if not self.items and self._open is None:
            yield from self._begin(_Message)
        yield from self.end("incomplete" if is_cut else "completed")

    def _in(self, kind: "type[_OpenItem]") -> Iterator[EventFields]:
        """Begin an item of this kind unless one is open."""
        if type(self._open) is not kind:
            yield from self.end()
            yield from self._begin(kind)

    def _begin(self, kind: "type[_OpenItem]", **fields: Any) -> Iterator[EventFields]:
        index = len(self.items)
        self._open = kind(f"{kind.prefix}_{self._suffix}{index:02x}", index, fields, seals=self._form.seals)
        yield {"type": "response.output_item.added", "output_index": index, "item": self._open.item("in_progress")}
        yield from self._open.begin()

    def _piece(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[EventFields]:
        assert self._open is not None, "an item was begun"
        yield self._open.piece(text, logprobs)

    def _logprobs(self, tokens: Sequence[OutputToken]) -> Sequence[TokenLogprob]:
        return (chat_logprobs(self._tokenizer, tokens).content or ()) if self._form.logprobs else ()


class _OpenItem:
    """An item that grows piece by piece."""

    prefix: ClassVar[str]
    """Prefix of the item's id."""
    event: ClassVar[str]
    """Type of the events of its pieces, without `.delta` or `.done`."""
    key: ClassVar[str] = "text"
    """The property of the `.done` event with the whole text."""

    def __init__(self, item_id: str, index: int, fields: Mapping[str, Any], *, seals: bool) -> None:
        self.id = item_id
        self.index = index
        self.fields = fields
        self.seals = seals
        self.text = ""
        self._pieces: list[str] = []

    def item(self, status: ItemStatus) -> OutputItem:
        """The current item."""
        raise NotImplementedError

    def begin(self) -> Iterator[EventFields]:
        """The events after `response.output_item.added`."""
        yield from ()

    def piece(self, text: str, logprobs: Sequence[TokenLogprob]) -> EventFields:
        """Add the next piece of text, and return its event."""
        self._pieces.append(text)
        return self.at(f"{self.event}.delta", delta=text)

    def end(self) -> Iterator[EventFields]:
        """Finish the item, and yield the events before `response.output_item.done`."""
        self.text = "".join(self._pieces)
        yield self.at(f"{self.event}.done", **{self.key: self.text})

    def at(self, kind: str, **fields: Any) -> EventFields:
        """An event of this item."""
        return {"type": kind, "item_id": self.id, "output_index": self.index, **fields}


class _FunctionCall(_OpenItem):
    prefix, event, key = "fc", "response.function_call_arguments", "arguments"

    def item(self, status: ItemStatus) -> OutputItem:
        return OutputFunctionCall(id=self.id, status=status, arguments=self.text, **self.fields)

    def end(self) -> Iterator[EventFields]:
        for event in super().end():
            yield {**event, "name": self.fields["name"]}


class _CustomCall(_OpenItem):
    prefix, event, key = "ctc", "response.custom_tool_call_input", "input"

    def item(self, status: ItemStatus) -> OutputItem:
        return OutputCustomCall(id=self.id, status=status, input=self.text, **self.fields)


class _PartItem(_OpenItem):
    """An item with one part, which holds its text."""

    part_event: ClassVar[str] = "response.content_part"
    part_index: ClassVar[str] = "content_index"
    has_part = False

    def part(self) -> OutputPart:
        """The current part."""
        raise NotImplementedError

    def begin(self) -> Iterator[EventFields]:
        self.has_part = True
        yield self.at(f"{self.part_event}.added", part=self.part())

    def end(self) -> Iterator[EventFields]:
        yield from super().end()
        yield self.at(f"{self.part_event}.done", part=self.part())

    def at(self, kind: str, **fields: Any) -> EventFields:
        return super().at(kind, **{self.part_index: 0}, **fields)


class _Message(_PartItem):
    prefix, event = "msg", "response.output_text"

    def __init__(self, item_id: str, index: int, fields: Mapping[str, Any], *, seals: bool) -> None:
        super().__init__(item_id, index, fields, seals=seals)
        self._logprobs: list[bytes] = []  # encoded once, because four events at the end repeat them

    def item(self, status: ItemStatus) -> OutputItem:
        return OutputMessage(id=self.id, status=status, content=[self.part()] if self.has_part else [])

    def part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=_listed(self._logprobs))

    def piece(self, text: str, logprobs: Sequence[TokenLogprob]) -> EventFields:
        encoded = list(map(ascii_json, logprobs))
        self._logprobs += encoded
        return {**super().piece(text, ()), "logprobs": _listed(encoded)}

    def end(self) -> Iterator[EventFields]:
        done, *others = super().end()
        yield {**done, "logprobs": _listed(self._logprobs)}
        yield from others


def _listed(encoded: Sequence[bytes]) -> Sequence[TokenLogprob]:
    """The list of log-probabilities that are encoded already."""
    return cast("Sequence[TokenLogprob]", Raw(b"[" + b",".join(encoded) + b"]"))


class _Sealable(_PartItem):
    """Reasoning, as content or as a summary."""

    prefix = "rs"

    def sealed(self, status: ItemStatus) -> str | UnsetType:
        """The sealed reasoning, empty until it is complete; UNSET if it was not requested."""
        if not self.seals:
            return UNSET
        return "" if status == "in_progress" else seal(reasoning=self.text)


class _Reasoning(_Sealable):
    event = "response.reasoning_text"

    def item(self, status: ItemStatus) -> OutputItem:
        content = [self.part()] if self.has_part else []
        return OutputReasoning(id=self.id, status=status, content=content, encrypted_content=self.sealed(status))

    def part(self) -> ReasoningText:
        return ReasoningText(text=self.text)


class _Summary(_Sealable):
    event = "response.reasoning_summary_text"
    part_event = "response.reasoning_summary_part"
    part_index = "summary_index"

    def item(self, status: ItemStatus) -> OutputItem:
        summary = [self.part()] if self.has_part else []
        return OutputReasoning(id=self.id, status=status, summary=summary, encrypted_content=self.sealed(status))

    def part(self) -> SummaryText:
        return SummaryText(text=self.text)
