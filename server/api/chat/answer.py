"""A chat completion, whole or in chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType

from server.api.answer_object import AnswerObject, doc
from server.api.chat.schema import ChatCompletionRequest
from server.api.dialect import AnswerContext
from server.api.openai.answer import (
    FINISH_REASON,
    OUTPUT_IDS,
    PROMPT_IDS,
    PROMPT_LOGPROBS,
    CumulativeLogprob,
    Envelope,
    OpenAIAnswer,
    OpenAIOptions,
    Score,
    StopReason,
    StreamUsage,
    TokenSources,
    Usage,
    openai_options,
    score_of,
)
from server.api.openai.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from server.generation.events import (
    ChoiceEnd,
    Delta,
    Event,
    FinishedBy,
    OutputToken,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from server.generation.planning.plan import Plan
from server.generation.result import WholeCall, WholeChoice
from server.http.event_stream import ascii_json
from server.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]
_FINISH_REASON = f"{FINISH_REASON} `tool_calls` or `function_call`: the end-of-sequence token, after calls."
_REASONING = "Extension: the model's reasoning before the answer."


class CalledFunction(AnswerObject):
    """A call of a function."""

    name: str
    arguments: Annotated[str, doc("A JSON object, as text; cut off if the finish_reason is `length`.")]


class CalledCustom(AnswerObject):
    """A call of a custom tool."""

    name: str
    input: Annotated[str, doc("The tool's input.")]


class CalledTool(AnswerObject):
    """A call of a tool."""

    id: Annotated[str, doc("Id of the call, for the message with its result.")]
    type: Literal["function", "custom"]
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class ChatMessage(AnswerObject):
    """The assistant's answer."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[str | None, doc("The text; null if there are calls and no text.")]
    refusal: Annotated[None, doc("Always null.")] = None
    annotations: Annotated[Sequence[Mapping[str, Any]], doc("Always empty.")] = ()
    reasoning_content: Annotated[str | None, doc(f"{_REASONING} Null if there is none.")]
    reasoning: Annotated[str | None, doc("Extension: same as `reasoning_content`.")]
    tool_calls: Annotated[Sequence[CalledTool] | UnsetType, doc("Calls of tools, in order.")] = UNSET
    function_call: Annotated[CalledFunction | UnsetType, doc("The call, if the request has `functions`.")] = UNSET


class ChatChoice(AnswerObject):
    """One of the n answers."""

    index: Annotated[int, doc("Index of the choice.")]
    message: ChatMessage
    logprobs: Annotated[ChatLogprobs | None, doc("Null unless the request asked for them.")]
    finish_reason: Annotated[FinishReason, doc(_FINISH_REASON)]
    stop_reason: StopReason = None
    score: Score = UNSET
    cumulative_logprob: CumulativeLogprob = UNSET
    token_ids: Annotated[Sequence[int] | None, doc(OUTPUT_IDS)] = None
    token_sources: TokenSources = UNSET


class ChatCompletion(Envelope):
    """Response schema for POST /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    service_tier: Literal["default"] = "default"
    choices: Annotated[Sequence[ChatChoice], doc("The answers; with beam search, best first.")]
    usage: Usage
    prompt_logprobs: Annotated[PromptLogprobs | None, doc(PROMPT_LOGPROBS)] = None
    prompt_token_ids: Annotated[Sequence[int] | None, doc(PROMPT_IDS)] = None


class FunctionDelta(AnswerObject):
    """An addition to a function's call."""

    name: Annotated[str | UnsetType, doc("Only in the call's first chunk.")] = UNSET
    arguments: Annotated[str, doc("The next piece of the JSON text.")]


class CustomDelta(AnswerObject):
    """An addition to a custom tool's call."""

    name: Annotated[str | UnsetType, doc("Only in the call's first chunk.")] = UNSET
    input: Annotated[str, doc("The next piece of the text.")]


class CallDelta(AnswerObject):
    """A chunk's addition to a call."""

    index: Annotated[int, doc("Index of the call.")]
    id: Annotated[str | UnsetType, doc("Only in the call's first chunk.")] = UNSET
    type: Annotated[Literal["function", "custom"] | UnsetType, doc("Only in the call's first chunk.")] = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChatDelta(AnswerObject):
    """A chunk's addition to the message."""

    role: Annotated[Literal["assistant"] | UnsetType, doc("In a choice's first chunk.")] = UNSET
    content: Annotated[str | UnsetType, doc("A piece of the text.")] = UNSET
    reasoning_content: Annotated[str | UnsetType, doc(_REASONING)] = UNSET
    reasoning: Annotated[str | UnsetType, doc("Extension: same as `reasoning_content`.")] = UNSET
    tool_calls: Annotated[Sequence[CallDelta] | UnsetType, doc("An addition to a call.")] = UNSET
    function_call: Annotated[FunctionDelta | UnsetType, doc("The call, if the request has `functions`.")] = UNSET


class ChatChunkChoice(AnswerObject):
    """A chunk's addition to a choice."""

    index: Annotated[int, doc("Index of the choice.")]
    delta: ChatDelta
    logprobs: Annotated[ChatLogprobs | None, doc("Logprobs of this piece's tokens, if requested.")] = None
    finish_reason: Annotated[FinishReason | None, doc(f"Null except in a choice's last chunk. {_FINISH_REASON}")] = None
    stop_reason: StopReason = UNSET
    score: Score = UNSET
    cumulative_logprob: CumulativeLogprob = UNSET
    token_ids: Annotated[
        Sequence[int] | UnsetType, doc("Extension: ids of this piece's tokens, with return_token_ids.")
    ] = UNSET
    token_sources: TokenSources = UNSET


class ChatCompletionChunk(Envelope):
    """Event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    service_tier: Literal["default"] = "default"
    choices: Annotated[
        Sequence[ChatChunkChoice], doc("One choice; none in the chunk with the usage of the whole request.")
    ]
    usage: StreamUsage = UNSET
    prompt_token_ids: Annotated[Sequence[int] | UnsetType, doc(f"{PROMPT_IDS} Only in a choice's first chunk.")] = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(OpenAIOptions):
    """Request fields that the answer depends on."""

    logprobs: bool
    lists_own_logprob: bool
    """Whether each token is included in its own alternatives."""
    calls_functions: bool
    """Whether a call has the older form, `function_call`."""
    hides_reasoning: bool
    echoed: str
    """The text with which the content of each choice begins."""


def chat_options(body: ChatCompletionRequest, plan: Plan, tokenizer: Tokenizer) -> ChatOptions:
    """The ChatOptions of a body."""
    return ChatOptions(
        **openai_options(body),
        logprobs=body.num_logprobs is not None,
        lists_own_logprob=bool(body.logprob_token_ids),
        calls_functions=bool(body.functions),
        hides_reasoning=not body.is_shown,
        echoed=body.echoed + plan.opening,
    )


class ChatAnswer(OpenAIAnswer):
    """Implements Answer. A stream has the role of each choice, its text and its end."""

    def __init__(self, answering: AnswerContext, options: ChatOptions) -> None:
        super().__init__(answering, options, ChatCompletion, ChatCompletionChunk)
        self._options = options
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        extra = self._prompt_ids()
        if self._options.prompt_logprobs is not None:
            prompt = self.run.prompts[0]
            extra["prompt_logprobs"] = prompt_logprobs(
                self.tokenizer, prompt.prompt_logprobs or (), self._options.prompt_logprobs, prompt.request.images
            )
        return self.body((self._choice(index, choice) for index, choice in enumerate(choices)), **extra)

    def frame(self, event: Event) -> bytes:
        role = b"" if event.choice in self._begun else self._role(event.choice)  # the first chunk, so written first
        if isinstance(event, ReasoningDelta) and self._options.hides_reasoning and not event.tokens:
            return role
        return role + (self._end(event) if isinstance(event, ChoiceEnd) else self._delta(event))

    def _choice(self, index: int, choice: WholeChoice) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=self._message(choice),
            logprobs=self._logprobs(choice.tokens),
            finish_reason=self._finish_reason(choice.finish_reason),
            stop_reason=choice.stop_reason,
            **score_of(choice.beam),
            **self.tokens_of(choice.tokens),
        )

    def _role(self, choice: int) -> bytes:
        self._begun.add(choice)
        delta = ChatDelta(role="assistant", content=self._options.echoed)
        return self.chunk_before(ascii_json(ChatChunkChoice(index=choice, delta=delta)), **self._prompt_ids())

    def _message(self, choice: WholeChoice) -> ChatMessage:
        text = self._options.echoed + choice.text
        reasoning = None if self._options.hides_reasoning else choice.reasoning or None
        return ChatMessage(
            content=None if choice.calls and not text else text,
            reasoning_content=reasoning,
            reasoning=reasoning,
            **self._calls(choice.calls),
        )

    def _calls(self, calls: Sequence[WholeCall]) -> dict[str, Any]:
        if not calls:
            return {}
        if self._options.calls_functions:
            return {"function_call": CalledFunction(name=calls[0].name, arguments=calls[0].text)}
        return {"tool_calls": [_whole_call(call) for call in calls]}

    def _delta(self, event: Delta) -> bytes:
        return self.chunk(
            ChatChunkChoice(
                index=event.choice,
                delta=self._delta_of(event),
                logprobs=self._logprobs(event.tokens),
                **self.tokens_of(event.tokens),
            )
        )

    def _delta_of(self, event: Delta) -> ChatDelta:
        match event:
            case TextDelta():
                return ChatDelta(content=event.text)
            case ReasoningDelta() if self._options.hides_reasoning:
                return ChatDelta()
            case ReasoningDelta():
                return ChatDelta(reasoning_content=event.text, reasoning=event.text)
            case ToolCallBegin() if self._options.calls_functions:
                return ChatDelta(function_call=FunctionDelta(name=event.name, arguments=""))
            case ToolCallDelta() if self._options.calls_functions:
                return ChatDelta(function_call=FunctionDelta(arguments=event.text))
            case ToolCallBegin() | ToolCallDelta():
                return ChatDelta(tool_calls=[_call_delta(event)])

    def _end(self, event: ChoiceEnd) -> bytes:
        return self.chunk(
            ChatChunkChoice(
                index=event.choice,
                delta=ChatDelta(),
                finish_reason=self._finish_reason(event.reason),
                stop_reason=event.stop_reason,
                **score_of(event.beam),
            )
        )

    def _finish_reason(self, reason: FinishedBy) -> FinishReason:
        return "function_call" if reason == "tool_calls" and self._options.calls_functions else reason

    def _logprobs(self, tokens: Sequence[OutputToken]) -> ChatLogprobs | None:
        options = self._options
        if not options.logprobs:
            return None
        return chat_logprobs(self.tokenizer, tokens, as_ids=options.tokens_as_ids, lists_own=options.lists_own_logprob)

    def _prompt_ids(self) -> dict[str, Any]:
        prompt = self.run.prompts[0].request.prompt
        return {"prompt_token_ids": list(prompt)} if self._options.return_token_ids else {}


def _whole_call(call: WholeCall) -> CalledTool:
    if call.is_custom:
        return CalledTool(id=call.id, type="custom", custom=CalledCustom(name=call.name, input=call.text))
    return CalledTool(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.text))


def _call_delta(event: ToolCallBegin | ToolCallDelta) -> CallDelta:
    first: dict[str, Any] = {}
    name: str | UnsetType = UNSET
    text = ""
    if isinstance(event, ToolCallDelta):
        text = event.text
    else:
        name, first = event.name, {"id": event.id, "type": "custom" if event.is_custom else "function"}
    if event.is_custom:
        return CallDelta(index=event.call, custom=CustomDelta(name=name, input=text), **first)
    return CallDelta(index=event.call, function=FunctionDelta(name=name, arguments=text), **first)
