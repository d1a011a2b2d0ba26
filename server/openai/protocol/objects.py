"""What the server answers: OpenAI's objects with every property that its schema requires, and our extensions.

Built with the properties that apply; those that were not set are left out of the JSON, those set to None are null.
"""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]


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


class PromptTokensDetails(ResponseModel):
    """Of the prompt's tokens."""

    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(ResponseModel):
    """Of the completion's tokens."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = Field(0, description="Draft tokens of any method that became output.")
    rejected_prediction_tokens: int = Field(0, description="Draft tokens that were verified in vain.")


class Usage(ResponseModel):
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(ResponseModel):
    """One token and its log-probability."""

    token: str = Field(description=r"Its text; `bytes:\xe2` and so on where it is no whole characters.")
    logprob: float = Field(description="-9999 where the probability is zero.")
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer, with the most probable alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """Log-probabilities of a chat completion."""

    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class CompletionLogprobs(ResponseModel):
    """Log-probabilities of a completion, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(ResponseModel):
    """An alternative for a token of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatMessage(ResponseModel):
    """The assistant's answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None
    annotations: list[dict[str, Any]]


class ChatChoice(ResponseModel):
    """One of the n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(None, description="Extension: the stop string or stop token.")
    score: float | None = Field(None, description="Extension, of beam search: what the choice was ranked by.")
    cumulative_logprob: float | None = Field(None, description="Extension, of beam search, after bans and penalties.")
    token_ids: list[int] | None = Field(None, description="Extension, with return_token_ids.")


class Envelope(ResponseModel):
    """What all answers and chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int = Field(description="Extension: the request's seed, or the one that was drawn for it.")
    verification: Literal["rejection", "typical"] | None = Field(
        None,
        description="Extension, where the request asked for one of these: the answer is not the one that it would be "
        "without speculation. After `rejection` it is of the same distribution, after `typical` of another.",
    )


class ChatCompletion(Envelope):
    """Answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    service_tier: Literal["default"] = "default"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = Field(None, description="Extension, with prompt_logprobs.")
    prompt_token_ids: list[int] | None = Field(None, description="Extension, with return_token_ids.")


class ChatDelta(ResponseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(ResponseModel):
    """What a chunk adds to a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = Field(None, description="Extension: the stop string or stop token.")
    score: float | None = Field(None, description="Extension, of beam search: what the choice was ranked by.")
    cumulative_logprob: float | None = Field(None, description="Extension, of beam search, after bans and penalties.")
    token_ids: list[int] | None = Field(None, description="Extension, with return_token_ids.")


class ChatCompletionChunk(Envelope):
    """Event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    service_tier: Literal["default"] = "default"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = Field(None, description="Extension, in a choice's first chunk.")


class CompletionChoice(ResponseModel):
    """One of the answers to one of the prompts; in a stream, what a chunk adds to it."""

    index: int = Field(description="Prompt number times n, plus the number of the answer.")
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None = Field(description="Null in all chunks of a stream but the last.")
    stop_reason: str | int | None = Field(None, description="Extension: the stop string or stop token.")
    score: float | None = Field(None, description="Extension, of beam search: what the choice was ranked by.")
    cumulative_logprob: float | None = Field(None, description="Extension, of beam search, after bans and penalties.")
    seed: int = Field(description="Extension: with this seed the prompt alone gives the same answers.")
    token_ids: list[int] | None = Field(None, description="Extension, with return_token_ids.")
    prompt_token_ids: list[int] | None = Field(None, description="Extension, with return_token_ids.")
    prompt_logprobs: PromptLogprobs | None = Field(None, description="Extension, with prompt_logprobs.")


class Completion(Envelope):
    """Answer of POST /v1/completions, and event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(ResponseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "samewise"
    max_model_len: int = Field(description="Extension: prompt and output together, in tokens.")


class ModelList(ResponseModel):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]
