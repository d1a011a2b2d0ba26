"""A message, whole or as the events of a stream."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, cast

import msgspec
from msgspec import UNSET
from pydantic_core import from_json

from scheduler.interface import BeamScore
from server.api.answer_object import AnswerObject, TemplateDate, Warnings, doc
from server.api.dialect import AnswerContext
from server.api.messages.blocks import signature_of
from server.api.messages.errors import MessagesErrorBody, error_frame
from server.api.messages.schema import MessagesRequest, ThinkingOff
from server.api.openai.answer import CACHE_WRITTEN, CumulativeLogprob, Score, Verification, score_of
from server.errors import ApiError
from server.generation.events import (
    ChoiceEnd,
    Event,
    FinishedBy,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
    Usage,
)
from server.generation.planning.plan import Plan
from server.generation.result import WholeCall, WholeChoice, WholePart, WholeReasoning, WholeText
from server.http.event_stream import ascii_json
from server.text.tokenizer import Tokenizer

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
_STOP_REASON = (
    "`end_turn`: the end-of-sequence token; `tool_use`: the same, after calls; `stop_sequence`: a stop sequence or a "
    "token of `stop_token_ids`; `max_tokens`: the token limit; `model_context_window_exceeded`: the context was full "
    "before `max_tokens`."
)
_STOP_SEQUENCE = "The stop sequence that ended the output, or the stop token's text."


class AnsweredText(AnswerObject, tag_field="type", tag="text"):
    """A text."""

    text: str
    citations: Annotated[Sequence[Any], doc("Always empty.")] = ()


class AnsweredThinking(AnswerObject, tag_field="type", tag="thinking"):
    """The model's thinking before its answer."""

    thinking: Annotated[str, doc("The text; empty with `display: omitted`.")]
    signature: Annotated[str, doc("To be sent back with the block; contains thinking that is not shown.")]


class Caller(AnswerObject, tag_field="type", tag="direct"):
    """The caller of a tool: always the model."""


class AnsweredToolUse(AnswerObject, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: Annotated[str, doc("Id of the call, for the block with its result.")]
    name: str
    input: Annotated[Mapping[str, Any], doc("The arguments; if the call was cut off, only complete ones.")]
    caller: Caller = Caller()


Block = AnsweredText | AnsweredThinking | AnsweredToolUse


class ThinkingTokens(AnswerObject):
    """Counts of certain output tokens."""

    thinking_tokens: Annotated[int, doc("Tokens up to the end of the thinking.")]


class CacheCreation(AnswerObject):
    """Prompt tokens that were added to the prefix cache, by lifetime."""

    ephemeral_1h_input_tokens: Annotated[int, doc("Always 0.")] = 0
    ephemeral_5m_input_tokens: Annotated[int, doc("All of them; they stay until they are evicted.")]


class MessageUsage(AnswerObject):
    """Token counts of a message; in a stream's first event, so far."""

    input_tokens: Annotated[
        int, doc("Prompt tokens without those in the next two properties; the three add up to the whole prompt.")
    ]
    cache_read_input_tokens: Annotated[int, doc("Prompt tokens that were found in the prefix cache.")]
    cache_creation_input_tokens: Annotated[int, doc(CACHE_WRITTEN)]
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: ThinkingTokens
    server_tool_use: Annotated[None, doc("Always null.")] = None
    service_tier: Literal["standard"] = "standard"
    inference_geo: Annotated[None, doc("Always null.")] = None


class AnsweredMessage(AnswerObject):
    """Response schema for POST /v1/messages."""

    id: Annotated[str, doc("Unique id of the answer.")]
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: Annotated[str, doc("Name of the served model.")]
    content: Annotated[
        Sequence[Block],
        doc("Blocks in the order of generation. If the last message was the assistant's, its continuation."),
    ]
    stop_reason: Annotated[StopReason | None, doc(f"{_STOP_REASON} Null in the first event of a stream.")] = None
    stop_sequence: Annotated[str | None, doc(_STOP_SEQUENCE)] = None
    stop_details: Annotated[None, doc("Always null.")] = None
    container: Annotated[None, doc("Always null.")] = None
    usage: MessageUsage
    system_fingerprint: Annotated[
        str, doc("Extension: identifies the model, settings and version that answers depend on.")
    ]
    seed: Annotated[int, doc("Extension: the request's seed, or the drawn one.")]
    template_date: TemplateDate = UNSET
    verification: Verification = UNSET
    score: Score = UNSET
    cumulative_logprob: CumulativeLogprob = UNSET
    warnings: Warnings = UNSET


class MessageStart(AnswerObject, tag_field="type", tag="message_start"):
    """First event of a stream."""

    message: Annotated[AnsweredMessage, doc("The message, without content.")]


class Ping(AnswerObject, tag_field="type", tag="ping"):
    """Event after the first one, and whenever a stream is silent."""


class BlockStart(AnswerObject, tag_field="type", tag="content_block_start"):
    """Event that begins a block."""

    index: Annotated[int, doc("Index of the block in the content.")]
    content_block: Annotated[Block, doc("The block, still empty.")]


class AddedText(AnswerObject, tag_field="type", tag="text_delta"):
    """The next piece of a text."""

    text: str


class AddedThinking(AnswerObject, tag_field="type", tag="thinking_delta"):
    """The next piece of the thinking."""

    thinking: str


class AddedSignature(AnswerObject, tag_field="type", tag="signature_delta"):
    """The signature, at the end of the thinking."""

    signature: str


class AddedInput(AnswerObject, tag_field="type", tag="input_json_delta"):
    """The next piece of a call's arguments."""

    partial_json: Annotated[str, doc("All pieces together are a JSON object, unless the call was cut off.")]


Added = AddedText | AddedThinking | AddedSignature | AddedInput


class BlockDelta(AnswerObject, tag_field="type", tag="content_block_delta"):
    """Event that adds a piece to a block."""

    index: int
    delta: Added


class BlockStop(AnswerObject, tag_field="type", tag="content_block_stop"):
    """Event that ends a block."""

    index: int


class MessageEnd(AnswerObject):
    """The reason why a message ended."""

    stop_reason: Annotated[StopReason, doc(_STOP_REASON)]
    stop_sequence: Annotated[str | None, doc(_STOP_SEQUENCE)] = None
    stop_details: Annotated[None, doc("Always null.")] = None
    container: Annotated[None, doc("Always null.")] = None
    score: Score = UNSET
    cumulative_logprob: CumulativeLogprob = UNSET


class MessageDelta(AnswerObject, tag_field="type", tag="message_delta"):
    """Event after the last block."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(AnswerObject, tag_field="type", tag="message_stop"):
    """Last event of a stream."""


MessageEvent = (
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessagesErrorBody
)
"""An event of a streamed message; its `type` is also in the `event:` line."""


class TokenCount(AnswerObject):
    """Response schema for POST /v1/messages/count_tokens."""

    input_tokens: Annotated[int, doc("Tokens of the prompt, after the chat template.")]
    warnings: Warnings = UNSET


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """Request fields that the answer depends on."""

    hides_thinking: bool
    is_cut_by_context: bool
    """Whether the context has room for fewer tokens than `max_tokens`."""


def message_options(body: MessagesRequest, plan: Plan, tokenizer: Tokenizer) -> MessageOptions:
    """The MessageOptions of a body."""
    display = None if body.thinking is None or isinstance(body.thinking, ThinkingOff) else body.thinking.display
    return MessageOptions(display == "omitted", plan.requests[0].max_tokens < body.max_tokens)


def event_frame(event: MessageEvent) -> bytes:
    """Encode an event of a stream."""
    kind = str(event.__struct_config__.tag)
    return b"event: " + kind.encode() + b"\ndata: " + ascii_json(event) + b"\n\n"


class MessagesAnswer:
    """Implements Answer."""

    keep_alive = event_frame(Ping())

    def __init__(self, answering: AnswerContext, options: MessageOptions) -> None:
        self._answering = answering
        self._run = answering.run
        self._options = options
        self._blocks = _Blocks(hides_thinking=options.hides_thinking)
        self._has_begun = False

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        (choice,) = choices
        content = [self._block(part) for part in choice.parts]
        return msgspec.json.encode(
            self._message(content, self._end(choice.finish_reason, choice.stop_reason, choice.beam))
        )

    def frame(self, event: Event) -> bytes:
        head = b"" if self._has_begun else self._begin()
        match event:
            case ChoiceEnd():
                end = MessageEnd(**self._end(event.reason, event.stop_reason, event.beam))
                delta = MessageDelta(delta=end, usage=_usage_of(self._run.usage))
                return head + self._blocks.close() + event_frame(delta)
            case TextDelta():
                return head + self._blocks.text(event.text)
            case ReasoningDelta():
                return head + self._blocks.thinking(event.text)
            case ToolCallBegin():
                return head + self._blocks.call(event.id, event.name)
            case ToolCallDelta():
                return head + self._blocks.arguments(event.text)

    def end(self) -> bytes:
        return event_frame(MessageStop())

    def failure(self, error: ApiError) -> bytes:
        return error_frame(error, self._answering.request_id)

    def _begin(self) -> bytes:
        self._has_begun = True
        return event_frame(MessageStart(message=self._message((), {}))) + self.keep_alive

    def _message(self, content: Sequence[Block], end: dict[str, Any]) -> AnsweredMessage:
        plan = self._run.plan
        return AnsweredMessage(
            id=plan.id,
            model=plan.model,
            content=content,
            usage=_usage_of(self._run.usage),
            system_fingerprint=self._answering.fingerprint,
            seed=plan.seed,
            template_date=plan.template_date or UNSET,
            verification=UNSET if plan.verification == "match" else plan.verification,
            warnings=plan.notices or UNSET,
            **end,
        )

    def _block(self, part: WholePart) -> Block:
        match part:
            case WholeText():
                return AnsweredText(text=part.text)
            case WholeReasoning():
                hidden = part.text if self._options.hides_thinking else ""
                return AnsweredThinking(thinking="" if hidden else part.text, signature=signature_of(hidden))
            case WholeCall():
                return AnsweredToolUse(id=part.id, name=part.name, input=as_written(part.text or "{}"))

    def _end(self, reason: FinishedBy, stop: str | int | None, beam: BeamScore | None) -> dict[str, Any]:
        sequence = self._answering.tokenizer.token_text(stop) if isinstance(stop, int) else stop
        return {"stop_reason": self._stop_reason(reason, sequence), "stop_sequence": sequence, **score_of(beam)}

    def _stop_reason(self, reason: FinishedBy, sequence: str | None) -> StopReason:
        if reason == "length":
            return "model_context_window_exceeded" if self._options.is_cut_by_context else "max_tokens"
        if sequence is not None:
            return "stop_sequence"
        return "tool_use" if reason == "tool_calls" else "end_turn"


class _Blocks:
    """Writes the blocks of a stream, one after the other."""

    def __init__(self, *, hides_thinking: bool) -> None:
        self._hides_thinking = hides_thinking
        self._hidden: list[str] = []
        self._open: Literal["text", "thinking", "tool_use"] | None = None
        self._index = -1

    def text(self, piece: str) -> bytes:
        """Continue a text, or begin one."""
        if not piece:
            return b""
        head = b"" if self._open == "text" else self._begin("text", AnsweredText(text=""))
        return head + self._delta(AddedText(text=piece))

    def thinking(self, piece: str) -> bytes:
        """Continue the thinking, or begin it."""
        if not piece:
            return b""
        head = b"" if self._open == "thinking" else self._begin("thinking", AnsweredThinking(thinking="", signature=""))
        if self._hides_thinking:
            self._hidden.append(piece)
            return head
        return head + self._delta(AddedThinking(thinking=piece))

    def call(self, id_: str, name: str) -> bytes:
        """Begin a call."""
        return self._begin("tool_use", AnsweredToolUse(id=id_, name=name, input={}))

    def arguments(self, piece: str) -> bytes:
        """Continue the arguments of the call."""
        return self._delta(AddedInput(partial_json=piece))

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if self._open is None:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = self._delta(AddedSignature(signature=signature_of("".join(self._hidden))))
            self._hidden.clear()
        self._open = None
        return signature + event_frame(BlockStop(index=self._index))

    def _begin(self, kind: Literal["text", "thinking", "tool_use"], block: Block) -> bytes:
        before = self.close()
        self._open = kind
        self._index += 1
        return before + event_frame(BlockStart(index=self._index, content_block=block))

    def _delta(self, piece: Added) -> bytes:
        return event_frame(BlockDelta(index=self._index, delta=piece))


def _usage_of(usage: Usage) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens - usage.cache_written_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        cache_creation_input_tokens=usage.cache_written_tokens,
        cache_creation=CacheCreation(ephemeral_5m_input_tokens=usage.cache_written_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ThinkingTokens(thinking_tokens=usage.reasoning_tokens),
    )


def as_written(text: str) -> Mapping[str, Any]:
    """A call's arguments, as the unchanged JSON text: not every number and string of JSON survives Python.

    If the arguments were cut off, only their complete part is returned, as clients would read it from a stream.
    """
    try:
        json.loads(text, parse_constant=_refuse, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return _complete(text)
    return cast("Mapping[str, Any]", msgspec.Raw(text.encode()))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON.")


def _complete(text: str) -> Mapping[str, Any]:
    try:
        return cast("Mapping[str, Any]", from_json(text, allow_partial=True))
    except ValueError:
        return {}
