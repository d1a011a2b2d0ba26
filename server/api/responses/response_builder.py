"""A response as its client sees it: the object, its output items, and the numbered events of its stream.

Whole and streamed answers are built here alike, so that they cannot differ.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from server.api.fields.rules import RequestModel
from server.api.fields.structured import JsonObjectFormat
from server.api.openai.logprobs import chat_logprobs
from server.api.responses.items import seal
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
from server.generation.notices import Notice, as_headers, as_warnings
from server.generation.planning.plan import Plan
from server.generation.result import WholeChoice
from server.text.tokenizer import Tokenizer

StreamEvent = dict[str, Any]
"""An event of a stream; its number is added last."""
Item = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The form in which a client gets the output."""

    names: Mapping[str, QualifiedName]
    """The client's names of the tools, by the model's."""
    logprobs: bool
    summarizes: bool
    """Whether reasoning is returned as a summary."""
    seals: bool
    """Whether reasoning is returned sealed as well."""


@dataclass(frozen=True, slots=True)
class ResponseFields:
    """What is known of a response before it is made. Plain data."""

    known: Mapping[str, Any]
    """The properties of the object that do not change."""
    form: OutputForm
    generates: bool
    """Whether there is to be any output."""


def response_fields(
    body: CreateResponse, plan: Plan, names: Mapping[str, QualifiedName], created: int
) -> ResponseFields:
    """The fields of the response to this body: the settings in force. `created` is in seconds of Unix time."""
    sampling = plan.requests[0].sampling
    reasoning = body.reasoning
    known = {
        "id": plan.id,
        "object": "response",
        "created_at": created,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": plan.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.is_stored,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "text": _text(body.text),
        "tool_choice": _plain(body.tool_choice) or "auto",
        "tools": [_tool(tool) for tool in body.tools or () if not isinstance(tool, HostedTool)],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "seed": plan.seed,
        **({} if body.user is None else {"user": body.user}),
        **({} if body.conversation_id is None else {"conversation": {"id": body.conversation_id}}),
        **({} if plan.verification == "match" else {"verification": plan.verification}),
        **as_warnings(plan.notices),
    }
    form = OutputForm(
        names=names,
        logprobs=sampling.logprobs is not None,
        summarizes=reasoning is not None and reasoning.is_summarized,
        seals="reasoning.encrypted_content" in body.includes,
    )
    return ResponseFields(known, form, generates=plan.requests[0].max_tokens > 0)


def _text(asked: TextConfig | None) -> dict[str, Any]:
    verbosity = {} if asked is None or asked.verbosity is None else {"verbosity": asked.verbosity}
    form = None if asked is None else asked.format
    match form:
        case JsonSchemaFormat():
            described = {
                "name": form.name,
                "description": form.description,
                "schema": form.schema_,
                "strict": bool(form.strict),
            }
            return {"format": {"type": "json_schema", **described}, **verbosity}
        case JsonObjectFormat():
            return {"format": {"type": "json_object"}, **verbosity}
    return {"format": {"type": "text"}, **verbosity}


def _tool(tool: RequestModel) -> Any:
    """A tool as it was sent; functions have all properties that OpenAI's schema requires."""
    sent = _plain(tool)
    required = {"description": None, "parameters": None, "strict": False}
    return {**required, **sent} if sent["type"] == "function" else sent


def _plain(value: object) -> Any:
    return value.model_dump(exclude_none=True, by_alias=True) if isinstance(value, RequestModel) else value


class ResponseBuilder:
    """Builds one response from the events of its run, and returns the events of its stream."""

    def __init__(self, fields: ResponseFields, fingerprint: str, tokenizer: Tokenizer) -> None:
        self.output = Output(fields.known["id"], fields.form, tokenizer)
        self.status: Status = "queued" if fields.known["background"] else "in_progress"
        self.has_begun = False
        self.late_notices: list[Notice] = []
        """Warnings that came up after the response had begun."""
        self._known = {**fields.known, "system_fingerprint": fingerprint}
        self._generates = fields.generates
        self._has_started = False
        self._is_cut = False
        self._error: Mapping[str, str] | None = None
        self._completed_at: int | None = None
        self._usage: Mapping[str, Any] | None = None
        self._number = 0

    def response(self) -> dict[str, Any]:
        """The object as it is now."""
        return {
            **self._known,
            "status": self.status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": list(self.output.items),
            "usage": self._usage,
        }

    def begin(self) -> Iterator[StreamEvent]:
        """Announce the response, once."""
        if self.has_begun:
            return
        self.has_begun = True
        yield self._with_response("response.created")
        if self.status == "queued":
            yield self._with_response("response.queued")

    def start(self) -> Iterator[StreamEvent]:
        """Announce that the model works on it, once."""
        yield from self.begin()
        if not self._has_started:
            self._has_started = True
            self.status = "in_progress"
            yield self._with_response("response.in_progress")

    def add(self, event: Event) -> Iterator[StreamEvent]:
        """Add an event of the run."""
        yield from self.start()
        if isinstance(event, ChoiceEnd) and self._generates:
            self._is_cut = event.reason == "length"
            yield from self._numbered(self.output.end_all(is_cut=self._is_cut))
        elif not isinstance(event, ChoiceEnd):
            yield from self._numbered(self.output.add(event))

    def end(self, usage: Usage) -> Iterator[StreamEvent]:
        """End a response whose run has ended."""
        self._usage = response_usage(usage)
        if not self._is_cut:
            self._completed_at = int(time.time())
        yield from self._ended("incomplete" if self._is_cut else "completed")

    def fail(self, error: ApiError) -> Iterator[StreamEvent]:
        """End a response with an error."""
        self._error = response_failure(error)
        yield from self._ended("failed")

    def cancel(self) -> Iterator[StreamEvent]:
        """End a response that nobody wants any more."""
        yield from self._ended("cancelled")

    def lose(self, error: ApiError) -> None:
        """Turn a response that has ended, and could not be stored, into a failed one without output."""
        self._error = {"code": "server_error", "message": error.message}
        self.status = "failed"
        self._completed_at = None
        self.output.items.clear()

    def warn(self, *notices: Notice) -> None:
        """Add warnings to those of the beginning."""
        self.late_notices += notices
        warnings = [*self._known.get("warnings", ()), *as_warnings(notices).get("warnings", ())]
        self._known = {**self._known, "warnings": warnings}

    def end_again(self) -> StreamEvent:
        """The last event once more, after the response has changed."""
        self._number -= 1
        return self._with_response(f"response.{self.status}")

    def _ended(self, status: Status) -> Iterator[StreamEvent]:
        yield from self.start()
        yield from self._numbered(self.output.end("incomplete"))
        self.status = status
        yield self._with_response(f"response.{status}")

    def _with_response(self, kind: str) -> StreamEvent:
        (event,) = self._numbered([{"type": kind, "response": self.response()}])
        return event

    def _numbered(self, events: Iterable[StreamEvent]) -> Iterator[StreamEvent]:
        for event in events:
            yield {"type": event["type"], "sequence_number": self._number, **event}
            self._number += 1


def response_failure(error: ApiError) -> Mapping[str, str]:
    """The ResponseFailure of objects.py for an error."""
    kinds = ((RateLimitError, "rate_limit_exceeded"), (InvalidRequestError, "invalid_prompt"))
    code = next((code for kind, code in kinds if isinstance(error, kind)), "server_error")
    return {"code": code, "message": error.message}


def response_usage(usage: Usage) -> dict[str, Any]:
    """The ResponseUsage of objects.py for a usage."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_written_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_drafts,
            "rejected_prediction_tokens": usage.rejected_drafts,
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def compaction(plan: Plan, choice: WholeChoice, usage: Usage, created: int) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of an answer with a compacted conversation; `choice` is its summary.

    Raises InvalidRequestError if there is no summary.
    """
    if not choice.text.strip():
        message = "Invalid 'input': the model came to no summary of it, perhaps for want of room in the context."
        raise InvalidRequestError(message, param="input", code="invalid_value")
    cut = [Notice("input", "Its summary was cut off where the context ends.")]
    notices = [*plan.notices, *(cut if choice.finish_reason == "length" else [])]
    suffix = plan.id.partition("_")[2]
    item = {"id": f"cmp_{suffix}", "type": "compaction", "encrypted_content": seal(summary=choice.text)}
    answer = {
        "id": plan.id,
        "object": "response.compaction",
        "created_at": created,
        "output": [item],
        "usage": response_usage(usage),
        "seed": plan.seed,
        **as_warnings(notices),
    }
    return msgspec.json.encode(answer), as_headers(notices)


class Output:
    """The output of one response as it grows: finished items, and the one that is open."""

    def __init__(self, response_id: str, form: OutputForm, tokenizer: Tokenizer) -> None:
        self.items: list[Item] = []
        """The finished items."""
        self._suffix = response_id.partition("_")[2]
        self._form = form
        self._tokenizer = tokenizer
        self._open: _OpenItem | None = None

    def add(self, event: Delta) -> Iterator[StreamEvent]:
        """Add what the model did next."""
        match event:
            case TextDelta(text="") if type(self._open) is not _Message:
                pass  # tokens of a call's end, or the one that ends an empty answer
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

    def end(self, status: str = "completed") -> Iterator[StreamEvent]:
        """Finish the open item, if there is one, with this status."""
        if self._open is None:
            return
        ended, self._open = self._open, None
        yield from ended.end(status)
        item = ended.item(status)
        self.items.append(item)
        yield {"type": "response.output_item.done", "output_index": ended.index, "item": item}

    def end_all(self, *, is_cut: bool) -> Iterator[StreamEvent]:
        """Finish the output of a model that has ended or was cut off. An empty answer is an empty message."""
        if not self.items and self._open is None:
            yield from self._begin(_Message)
        yield from self.end("incomplete" if is_cut else "completed")

    def _in(self, kind: "type[_OpenItem]") -> Iterator[StreamEvent]:
        """Begin an item of this kind unless one is open."""
        if type(self._open) is not kind:
            yield from self.end()
            yield from self._begin(kind)

    def _begin(self, kind: "type[_OpenItem]", **fields: Any) -> Iterator[StreamEvent]:
        index = len(self.items)
        self._open = kind(f"{kind.prefix}_{self._suffix}{index:02x}", index, fields, seals=self._form.seals)
        yield {"type": "response.output_item.added", "output_index": index, "item": self._open.item("in_progress")}
        yield from self._open.begin()

    def _piece(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> Iterator[StreamEvent]:
        assert self._open is not None, "an item was begun"
        yield self._open.piece(text, logprobs)

    def _logprobs(self, tokens: Sequence[OutputToken]) -> Sequence[Mapping[str, Any]]:
        if not self._form.logprobs:
            return ()
        content: Sequence[Mapping[str, Any]] = chat_logprobs(self._tokenizer, tokens)["content"]
        return content


class _OpenItem:
    """An item that is being made of pieces."""

    prefix: ClassVar[str]
    """The beginning of its id."""
    kind: ClassVar[str]
    """The item's type."""
    event: ClassVar[str]
    """The type of the events of its pieces, without the end."""
    key: ClassVar[str]
    """The property with all of its text."""

    def __init__(self, item_id: str, index: int, fields: Mapping[str, Any], *, seals: bool) -> None:
        self.id = item_id
        self.index = index
        self.fields = fields
        self.seals = seals
        self.text = ""
        self._pieces: list[str] = []

    def item(self, status: str) -> Item:
        """The item as it is now."""
        return {"id": self.id, "type": self.kind, "status": status, **self.content(status)}

    def content(self, status: str) -> Item:
        """The properties that not all items have."""
        return {**self.fields, self.key: self.text}

    def begin(self) -> Iterator[StreamEvent]:
        """The events after the one that adds it."""
        yield from ()

    def piece(self, text: str, logprobs: Sequence[Mapping[str, Any]]) -> StreamEvent:
        """Add the next piece of its text."""
        self._pieces.append(text)
        return self.at(f"{self.event}.delta", delta=text)

    def end(self, status: str) -> Iterator[StreamEvent]:
        """Finish it; the events before the one that says so."""
        self.text = "".join(self._pieces)
        yield self.at(f"{self.event}.done", **{self.key: self.text})

    def at(self, kind: str, **fields: Any) -> StreamEvent:
        """An event of this item."""
        return {"type": kind, "item_id": self.id, "output_index": self.index, **fields}


class _FunctionCall(_OpenItem):
    prefix, kind, event, key = "fc", "function_call", "response.function_call_arguments", "arguments"

    def end(self, status: str) -> Iterator[StreamEvent]:
        for event in super().end(status):
            yield {**event, "name": self.fields["name"]}


class _CustomCall(_OpenItem):
    prefix, kind, event, key = "ctc", "custom_tool_call", "response.custom_tool_call_input", "input"


class _PartItem(_OpenItem):
    """An item with one part, which holds its text."""

    key = "text"
    part_event: ClassVar[str] = "response.content_part"
    part_index: ClassVar[str] = "content_index"
    has_part = False

    def part(self) -> StreamEvent:
        """The part as it is now."""
        raise NotImplementedError

    def parts(self) -> list[StreamEvent]:
        """The part, if there is one yet."""
        return [self.part()] if self.has_part else []

    def begin(self) -> Iterator[StreamEvent]:
        self.has_part = True
        yield self.at(f"{self.part_event}.added", part=self.part())

    def end(self, status: str) -> Iterator[StreamEvent]:
        yield from super().end(status)
        yield self.at(f"{self.part_event}.done", part=self.part())

    def at(self, kind: str, **fields: Any) -> StreamEvent:
        return super().at(kind, **{self.part_index: 0}, **fields)


class _Message(_PartItem):
    prefix, kind, event = "msg", "message", "response.output_text"

    def __init__(self, item_id: str, index: int, fields: Mapping[str, Any], *, seals: bool) -> None:
        super().__init__(item_id, index, fields, seals=seals)
        self._logprobs: list[Mapping[str, Any]] = []

    def content(self, status: str) -> Item:
        return {"role": "assistant", "content": self.parts()}

    def part(self) -> StreamEvent:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}

    def piece(self, text: str, logprobs: Sequence[Mapping[str, Any]]) -> StreamEvent:
        self._logprobs += logprobs
        return {**super().piece(text, ()), "logprobs": list(logprobs)}

    def end(self, status: str) -> Iterator[StreamEvent]:
        done, *others = super().end(status)
        yield {**done, "logprobs": list(self._logprobs)}
        yield from others


class _Reasoning(_PartItem):
    prefix, kind, event = "rs", "reasoning", "response.reasoning_text"

    def content(self, status: str) -> Item:
        return {"summary": [], "content": self.parts(), **self._sealed(status)}

    def part(self) -> StreamEvent:
        return {"type": "reasoning_text", "text": self.text}

    def _sealed(self, status: str) -> Item:
        if not self.seals:
            return {}
        return {"encrypted_content": "" if status == "in_progress" else seal(reasoning=self.text)}


class _Summary(_Reasoning):
    event = "response.reasoning_summary_text"
    part_event = "response.reasoning_summary_part"
    part_index = "summary_index"

    def content(self, status: str) -> Item:
        return {"summary": self.parts(), **self._sealed(status)}

    def part(self) -> StreamEvent:
        return {"type": "summary_text", "text": self.text}
