"""Answers of POST /api/chat and /api/generate, whole or as the lines of a stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.api.answer_object import WARNINGS, AnswerObject, TemplateDate, doc
from server.api.dialect import AnswerContext
from server.api.messages.answer import as_written
from server.api.ollama.errors import error_line
from server.api.openai.logprobs import TokenLogprob, chat_logprobs
from server.errors import ApiError
from server.generation.events import (
    ChoiceEnd,
    Event,
    FinishedBy,
    OutputToken,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from server.generation.notices import Notice
from server.generation.result import WholeChoice
from server.http.event_stream import ascii_json

_NANOSECONDS = 1_000_000_000


class OllamaCalledFunction(AnswerObject):
    """A function and its arguments."""

    index: Annotated[int, doc("Index of the call.")]
    name: str
    arguments: Annotated[Mapping[str, Any], doc("The arguments; if the call was cut off, only complete ones.")]


class OllamaCall(AnswerObject):
    """A call of a tool."""

    id: Annotated[str, doc("Id of the call, which the message with its result may name.")]
    function: OllamaCalledFunction


class OllamaAnsweredMessage(AnswerObject):
    """The model's message, or the next piece of it."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[str, doc("The text.")]
    thinking: Annotated[str | UnsetType, doc("The thinking before the answer.")] = UNSET
    tool_calls: Annotated[Sequence[OllamaCall] | UnsetType, doc("Calls of tools; in a stream, each is whole.")] = UNSET


class OllamaLine(AnswerObject):
    """An answer, or a line of its stream. All lines but the last have `done` false and no figures."""

    model: Annotated[str, doc("The model's name, as in the request.")]
    created_at: Annotated[str, doc("When the line was written (RFC 3339).")]
    done: Annotated[bool, doc("Whether this is the whole answer or the end of its stream.")]
    done_reason: Annotated[
        Literal["stop", "length", "load", "unload"] | UnsetType,
        doc("`load`: the request had no prompt, and the model is loaded. `unload`: it is not loaded any more."),
    ] = UNSET
    logprobs: Annotated[Sequence[TokenLogprob] | UnsetType, doc("With `logprobs`.")] = UNSET
    total_duration: Annotated[int | UnsetType, doc("Nanoseconds from the request's arrival to the last token.")] = UNSET
    load_duration: Annotated[int | UnsetType, doc("Nanoseconds until the model was loaded.")] = UNSET
    prompt_eval_count: Annotated[int | UnsetType, doc("Prompt tokens, with those in the prefix cache.")] = UNSET
    prompt_eval_duration: Annotated[
        int | UnsetType, doc("Nanoseconds from the request's arrival to the first token, without `load_duration`.")
    ] = UNSET
    eval_count: Annotated[int | UnsetType, doc("Output tokens.")] = UNSET
    eval_duration: Annotated[int | UnsetType, doc("Nanoseconds from the first token to the last.")] = UNSET
    seed: Annotated[int | UnsetType, doc("Extension: the request's seed, or the drawn one.")] = UNSET
    system_fingerprint: Annotated[
        str | UnsetType, doc("Extension: identifies the model, settings and version that answers depend on.")
    ] = UNSET
    template_date: TemplateDate = UNSET
    warnings: Annotated[Sequence[Notice] | UnsetType, doc(f"{WARNINGS} In a stream, only the first line has it.")] = (
        UNSET
    )


class OllamaChatAnswer(OllamaLine):
    """Response schema for POST /api/chat, and for each line of its stream."""

    message: Annotated[OllamaAnsweredMessage, doc("The message, or the next piece of it.")]


class OllamaGenerateAnswer(OllamaLine):
    """Response schema for POST /api/generate, and for each line of its stream."""

    response: Annotated[str, doc("The text, or the next piece of it.")]
    thinking: Annotated[str | UnsetType, doc("The thinking before the answer.")] = UNSET


@dataclass(frozen=True, slots=True)
class OllamaReports:
    """Request fields that the answer depends on."""

    model: str
    """The model's name, as the client wrote it."""
    logprobs: bool
    is_chat: bool
    keep_s: float | None
    """For how many seconds the model shall stay loaded afterwards."""
    load_s: float = 0.0
    """How long the request waited until the model was loaded."""


@dataclass(slots=True)
class _OpenCall:
    """A call whose arguments are not complete yet."""

    id: str
    name: str
    index: int
    tokens: list[OutputToken]
    pieces: list[str] = field(default_factory=list)


def now() -> str:
    """The time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def empty_line(model: str, *, is_chat: bool) -> bytes:
    """A line of a stream that says nothing but that it goes on."""
    return _encoded(_line(is_chat, "", UNSET, UNSET, model=model, created_at=now(), done=False))


def loaded_answer(
    model: str, reason: Literal["load", "unload"], *, is_chat: bool, warnings: Sequence[Notice]
) -> OllamaLine:
    """The answer to a request without a prompt."""
    envelope: dict[str, Any] = {"model": model, "created_at": now(), "done": True, "done_reason": reason}
    return _line(is_chat, "", UNSET, UNSET, warnings=warnings or UNSET, **envelope)


class OllamaAnswer:
    """Implements Answer."""

    def __init__(self, answering: AnswerContext, reports: OllamaReports) -> None:
        self._answering = answering
        self._run = answering.run
        self._reports = reports
        self._warnings = answering.run.plan.notices or UNSET
        self._call: _OpenCall | None = None

    @property
    def keep_alive(self) -> bytes:
        """A line without text: clients parse every line, so that an empty one would end them."""
        return _encoded(self._piece())

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        (choice,) = choices
        calls = [_call(one.id, one.name, index, one.text) for index, one in enumerate(choice.calls)]
        tokens = self._logprobs(choice.tokens)
        return msgspec.json.encode(
            self._last(choice.finish_reason, choice.text, choice.reasoning or UNSET, calls or UNSET, logprobs=tokens)
        )

    def frame(self, event: Event) -> bytes:
        if isinstance(event, ToolCallDelta):
            assert self._call is not None, "a call begins before its arguments"
            self._call.pieces.append(event.text)
            self._call.tokens += event.tokens
            return b""
        before = self._ended_call()
        match event:
            case ToolCallBegin():
                self._call = _OpenCall(event.id, event.name, event.call, [*event.tokens])
                return before
            case TextDelta():
                return before + _encoded(self._piece(event.text, logprobs=self._logprobs(event.tokens)))
            case ReasoningDelta():
                return before + _encoded(self._piece(thinking=event.text, logprobs=self._logprobs(event.tokens)))
            case ChoiceEnd():
                return before + _encoded(self._last(event.reason))

    def end(self) -> bytes:
        """Nothing: the end of the choice has ended the stream."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        return error_line(error)

    def _ended_call(self) -> bytes:
        """The line with the open call, which is complete now; empty if none is open."""
        call, self._call = self._call, None
        if call is None:
            return b""
        made = _call(call.id, call.name, call.index, "".join(call.pieces))
        return _encoded(self._piece(calls=[made], logprobs=self._logprobs(call.tokens)))

    def _piece(
        self, text: str = "", thinking: str | UnsetType = UNSET, calls: Sequence[OllamaCall] | UnsetType = UNSET,
        **more: Any,
    ) -> OllamaLine:  # fmt: skip
        """A line before the last."""
        warnings, self._warnings = self._warnings, UNSET  # only the first line has them
        envelope = {"model": self._reports.model, "created_at": now(), "done": False, "warnings": warnings}
        return _line(self._reports.is_chat, text, thinking, calls, **envelope, **more)

    def _last(
        self, reason: FinishedBy, text: str = "", thinking: str | UnsetType = UNSET,
        calls: Sequence[OllamaCall] | UnsetType = UNSET, **more: Any,
    ) -> OllamaLine:  # fmt: skip
        """The whole answer, or the last line of a stream."""
        before_s, after_s = self._run.seconds_of(0, 0)
        load_s = self._reports.load_s
        usage = self._run.usage
        warnings, self._warnings = self._warnings, UNSET
        return _line(
            self._reports.is_chat,
            text,
            thinking,
            calls,
            model=self._reports.model,
            created_at=now(),
            done=True,
            done_reason="length" if reason == "length" else "stop",
            total_duration=int((before_s + after_s) * _NANOSECONDS),
            load_duration=int(load_s * _NANOSECONDS),
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=int((before_s - load_s) * _NANOSECONDS),
            eval_count=usage.completion_tokens,
            eval_duration=int(after_s * _NANOSECONDS),
            seed=self._run.plan.seed,
            system_fingerprint=self._answering.fingerprint,
            template_date=self._run.plan.template_date or UNSET,
            warnings=warnings,
            **more,
        )

    def _logprobs(self, tokens: Sequence[OutputToken]) -> Sequence[TokenLogprob] | UnsetType:
        """An entry for each token, if the request asks for them."""
        if not self._reports.logprobs or not tokens:
            return UNSET
        return chat_logprobs(self._answering.tokenizer, tokens).content or UNSET


def _line(
    is_chat: bool, text: str, thinking: str | UnsetType, calls: Sequence[OllamaCall] | UnsetType, **envelope: Any
) -> OllamaLine:
    if not is_chat:
        return OllamaGenerateAnswer(response=text, thinking=thinking, **envelope)
    message = OllamaAnsweredMessage(content=text, thinking=thinking, tool_calls=calls)
    return OllamaChatAnswer(message=message, **envelope)


def _call(id_: str, name: str, index: int, arguments: str) -> OllamaCall:
    function = OllamaCalledFunction(index=index, name=name, arguments=as_written(arguments or "{}"))
    return OllamaCall(id=id_, function=function)


def _encoded(line: OllamaLine) -> bytes:
    return ascii_json(line) + b"\n"
