"""What the server answers: OpenAI's objects with every property that its schema requires, and our extensions.

Built with the properties that apply; those that were not set are left out of the JSON, those set to None are null.
"""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from server.api import answer_object

WARNINGS = answer_object.WARNINGS

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]
_FINISH_REASON = (
    "`stop`: a stop string, a stop token or the model's own end; `length`: the most tokens, or the context's end."
)
_CHAT_FINISH_REASON = f"{_FINISH_REASON} `tool_calls` or `function_call`: the model's own end, with calls before it."
_STOP_REASON = "Extension: the stop string or stop token; null after the model's own end and where the length ran out."
_SCORE = "Extension, of beam search: what the choice was ranked by."
_CUMULATIVE_LOGPROB = "Extension, of beam search, after bans and penalties."
_OUTPUT_IDS = "Extension: with return_token_ids, the tokens of the answer, otherwise null."
_SOURCES = (
    "Extension, with return_token_sources: for each token of the output, in the order of `token_ids`, `drawn` or "
    "`draft:METHOD`."
)
_PROMPT_IDS = "Extension: with return_token_ids, the tokens of the prompt, otherwise null."
_PROMPT_LOGPROBS = (
    "Extension: with prompt_logprobs, null for the first token, then, for each, its own and the most probable ones, by "
    "their ids. Otherwise null."
)


class ResponseModel(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    _constants: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        fields = cls.model_fields.items()
        cls._constants = frozenset(
            name for name, field in fields if not field.is_required() and field.default is not None
        )

    def model_post_init(self, context: object) -> None:
        """Constants are always part of the JSON; only a default of None means that a property does not apply."""
        self.__pydantic_fields_set__.update(self._constants)


CACHE_WRITTEN = "Added to the prefix cache, where the same prompt would find them."


class PromptTokensDetails(ResponseModel):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="Found in the prefix cache.")
    cache_write_tokens: int = Field(description=CACHE_WRITTEN)
    audio_tokens: int = Field(0, description="Always 0.")


class CompletionTokensDetails(ResponseModel):
    """Of the completion's tokens."""

    reasoning_tokens: int = Field(0, description="Up to the last of the reasoning.")
    audio_tokens: int = Field(0, description="Always 0.")
    accepted_prediction_tokens: int = Field(0, description="Draft tokens of any method that became output.")
    rejected_prediction_tokens: int = Field(0, description="Draft tokens that were verified in vain.")


class Usage(ResponseModel):
    """Tokens that a request took."""

    prompt_tokens: int = Field(description="Each prompt counts once, however many choices it has.")
    completion_tokens: int = Field(description="Of all choices, those included that `best_of` leaves out.")
    total_tokens: int = Field(description="Both.")
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(ResponseModel):
    """One token and its log-probability."""

    token: str = Field(description=r"Its text; `bytes:\xe2` and so on where it is no whole characters.")
    logprob: float = Field(description="-9999 where the probability is zero.")
    bytes: list[int] | None = Field(description="Its bytes.")


class TokenLogprob(TopLogprob):
    """A token of the answer, with the most probable alternatives."""

    top_logprobs: list[TopLogprob] = Field(description="As many as `top_logprobs` of the request says, best first.")


class ChatLogprobs(ResponseModel):
    """Log-probabilities of a chat completion."""

    content: list[TokenLogprob] | None = Field(description="One entry for each token of the answer.")
    refusal: None = Field(description="Always null.")


class CompletionLogprobs(ResponseModel):
    """Log-probabilities of a completion, as parallel lists."""

    tokens: list[str] = Field(description="Their texts, written as in chat completions.")
    token_logprobs: list[float | None] = Field(description="Null for the first token of an echoed prompt.")
    top_logprobs: list[dict[str, float] | None] = Field(
        description="By the tokens' texts, best first; the token itself is always among them. Null where it has none."
    )
    text_offset: list[int] = Field(description="Characters of `text` before each token.")


class PromptLogprob(ResponseModel):
    """An alternative for a token of the prompt."""

    logprob: float = Field(description="-9999 where the probability is zero.")
    rank: int = Field(description="1 is the most probable.")
    decoded_token: str = Field(description="Its text.")


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(ResponseModel):
    """A call of a function."""

    name: str
    arguments: str = Field(description="A JSON object, as text; cut off where the finish_reason is `length`.")


class CalledCustom(ResponseModel):
    """A call of a custom tool."""

    name: str
    input: str = Field(description="The text for it.")


class CalledTool(ResponseModel):
    """A call of a tool."""

    id: str = Field(description="For the message with its result.")
    type: Literal["function", "custom"]
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


_REASONING = "Extension: what the model thought before it answered."


class ChatMessage(ResponseModel):
    """The assistant's answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="The text; null where there are calls and no text.")
    refusal: str | None = Field(description="Always null.")
    annotations: list[dict[str, Any]] = Field(description="Always empty.")
    reasoning_content: str | None = Field(description=f"{_REASONING} Null where it did not.")
    reasoning: str | None = Field(description="Extension: the same by another name.")
    tool_calls: list[CalledTool] | None = Field(None, description="Tools to be called, in their order.")
    function_call: CalledFunction | None = Field(None, description="In answer to `functions`.")


class ChatChoice(ResponseModel):
    """One of the n answers."""

    index: int = Field(description="Number of the choice.")
    message: ChatMessage
    logprobs: ChatLogprobs | None = Field(description="Null unless the request asked for them.")
    finish_reason: ChatFinishReason = Field(description=_CHAT_FINISH_REASON)
    stop_reason: str | int | None = Field(None, description=_STOP_REASON)
    score: float | None = Field(None, description=_SCORE)
    cumulative_logprob: float | None = Field(None, description=_CUMULATIVE_LOGPROB)
    token_ids: list[int] | None = Field(description=_OUTPUT_IDS)
    token_sources: list[str] | None = Field(None, description=_SOURCES)


class ReportedNotice(ResponseModel):
    """Something of the request that was left out or changed."""

    path: str = Field(description="The field.")
    reason: str = Field(description="Why, or into what.")


class Envelope(ResponseModel):
    """What all answers and chunks begin with."""

    id: str = Field(description="That no other answer has; all chunks of a stream have the same.")
    created: int = Field(description="Unix time in seconds.")
    model: str = Field(description="Name of the served model.")
    system_fingerprint: str = Field(description="Changes whenever the answer to the same request may.")
    seed: int = Field(description="Extension: the request's seed, or the one that was drawn for it.")
    verification: Literal["rejection", "typical"] | None = Field(
        None,
        description="Extension, where the request asked for one of these: the answer is not the one that it would be "
        "without speculation. After `rejection` it is of the same distribution, after `typical` of another.",
    )
    warnings: list[ReportedNotice] | None = Field(None, description=f"{WARNINGS} Of a stream, in its first chunk.")


class ChatCompletion(Envelope):
    """Answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    service_tier: Literal["default"] = "default"
    choices: list[ChatChoice] = Field(description="The answers; of beam search, best first.")
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = Field(description=_PROMPT_LOGPROBS)
    prompt_token_ids: list[int] | None = Field(description=_PROMPT_IDS)


class FunctionDelta(ResponseModel):
    """What is added to a function's call."""

    name: str | None = Field(None, description="Once, at first.")
    arguments: str = Field(description="The next piece of the JSON text.")


class CustomDelta(ResponseModel):
    """What is added to a custom tool's call."""

    name: str | None = Field(None, description="Once, at first.")
    input: str = Field(description="The next piece of the text.")


class CallDelta(ResponseModel):
    """What a chunk adds to a call."""

    index: int = Field(description="Number of the call.")
    id: str | None = Field(None, description="Once, at first.")
    type: Literal["function", "custom"] | None = Field(None, description="Once, at first.")
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


class ChatDelta(ResponseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = Field(None, description="In a choice's first chunk.")
    content: str | None = Field(None, description="A piece of the text.")
    reasoning_content: str | None = Field(None, description=_REASONING)
    reasoning: str | None = Field(None, description="Extension: the same by another name.")
    tool_calls: list[CallDelta] | None = Field(None, description="What is added to a call.")
    function_call: FunctionDelta | None = Field(None, description="In answer to `functions`.")


class ChatChunkChoice(ResponseModel):
    """What a chunk adds to a choice."""

    index: int = Field(description="Number of the choice.")
    delta: ChatDelta
    logprobs: ChatLogprobs | None = Field(description="Of the tokens of this piece, where the request asked for them.")
    finish_reason: ChatFinishReason | None = Field(
        description=f"Null in all chunks but a choice's last. {_CHAT_FINISH_REASON}"
    )
    stop_reason: str | int | None = Field(None, description=_STOP_REASON)
    score: float | None = Field(None, description=_SCORE)
    cumulative_logprob: float | None = Field(None, description=_CUMULATIVE_LOGPROB)
    token_ids: list[int] | None = Field(None, description="Extension, with return_token_ids: those of this piece.")
    token_sources: list[str] | None = Field(None, description=_SOURCES)


class ChatCompletionChunk(Envelope):
    """Event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    service_tier: Literal["default"] = "default"
    choices: list[ChatChunkChoice] = Field(description="One choice; none in the chunk that brings the whole usage.")
    usage: Usage | None = Field(
        None,
        description="With `stream_options`: of the whole request in the last chunk and null before, or so far in every "
        "one.",
    )
    prompt_token_ids: list[int] | None = Field(None, description=f"{_PROMPT_IDS} In a choice's first chunk.")


class CompletionChoice(ResponseModel):
    """One of the answers to one of the prompts; in a stream, what a chunk adds to it."""

    index: int = Field(description="Prompt number times n, plus the number of the answer.")
    text: str = Field(description="The text, after the prompt with `echo`.")
    logprobs: CompletionLogprobs | None = Field(description="Null unless the request asked for them.")
    finish_reason: FinishReason | None = Field(
        description=f"{_FINISH_REASON} Null in all chunks of a stream but a choice's last."
    )
    stop_reason: str | int | None = Field(None, description=_STOP_REASON)
    score: float | None = Field(None, description=_SCORE)
    cumulative_logprob: float | None = Field(None, description=_CUMULATIVE_LOGPROB)
    seed: int = Field(description="Extension: with this seed the prompt alone gives the same answers.")
    token_ids: list[int] | None = Field(None, description=_OUTPUT_IDS)
    token_sources: list[str] | None = Field(None, description=_SOURCES)
    prompt_token_ids: list[int] | None = Field(
        None, description=f"{_PROMPT_IDS} Of a stream, in a choice's first chunk."
    )
    prompt_logprobs: PromptLogprobs | None = Field(None, description=_PROMPT_LOGPROBS)


class Completion(Envelope):
    """Answer of POST /v1/completions, and event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice] = Field(
        description="In a stream one, and none in the chunk that brings the whole usage."
    )
    usage: Usage | None = Field(
        None,
        description="In a stream, with `stream_options`: of the whole request in the last chunk and null before, or so "
        "far in every one.",
    )
