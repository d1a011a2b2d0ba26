"""What the server answers: Anthropic's objects with every property that its schema requires, and our extensions."""

from typing import Any, Literal

from pydantic import Field, RootModel

from server.api.messages.errors import MessagesErrorDetail
from server.api.openai.objects import CACHE_WRITTEN, WARNINGS, ReportedNotice, ResponseModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
_STOP_REASON = (
    "`end_turn`: the model's own end; `tool_use`: the same, after calls; `stop_sequence`: one of these, or a token of "
    "`stop_token_ids`; `max_tokens`; `model_context_window_exceeded`: the context had no room for `max_tokens`."
)
_STOP_SEQUENCE = "What ended the output; the text of a token."


class AnsweredText(ResponseModel):
    """A text."""

    type: Literal["text"]
    text: str
    citations: list[Any] = Field(max_length=0, description="Always empty.")


class AnsweredThinking(ResponseModel):
    """What the model thought before it answered."""

    type: Literal["thinking"]
    thinking: str = Field(description="Empty with `display` `omitted`.")
    signature: str = Field(description="For the next request, with the block. It holds what is not shown.")


class Caller(ResponseModel):
    """Who calls."""

    type: Literal["direct"]


class AnsweredToolUse(ResponseModel):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str = Field(description="For the block with its result.")
    name: str
    input: dict[str, Any] = Field(description="The arguments; of a call that was cut off, those that were complete.")
    caller: Caller


class ThinkingTokens(ResponseModel):
    """Of the output's tokens."""

    thinking_tokens: int = Field(description="Up to the last of the thinking.")


class CacheCreation(ResponseModel):
    """Tokens of the prompt that were added to the prefix cache, by how long they are kept."""

    ephemeral_1h_input_tokens: int = Field(description="Always 0.")
    ephemeral_5m_input_tokens: int = Field(description="All: they are kept until others need the room.")


class MessageUsage(ResponseModel):
    """Tokens that a message took; of a stream's first event, so far."""

    input_tokens: int = Field(
        description="Tokens of the prompt beside the next two; all three together are the whole prompt."
    )
    cache_read_input_tokens: int = Field(description="Tokens of the prompt that were found in the prefix cache.")
    cache_creation_input_tokens: int = Field(description=CACHE_WRITTEN)
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: ThinkingTokens
    server_tool_use: None = Field(description="Always null.")
    service_tier: Literal["standard"]
    inference_geo: None = Field(description="Always null.")


class AnsweredMessage(ResponseModel):
    """Answer of POST /v1/messages."""

    id: str = Field(description="That no other answer has.")
    type: Literal["message"]
    role: Literal["assistant"]
    model: str = Field(description="Name of the served model.")
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse] = Field(
        description="In the order in which the model wrote it. After a last message of the assistant, what follows it."
    )
    stop_reason: StopReason | None = Field(description=f"{_STOP_REASON} Null in the first event of a stream.")
    stop_sequence: str | None = Field(description=_STOP_SEQUENCE)
    stop_details: None = Field(description="Always null.")
    container: None = Field(description="Always null.")
    usage: MessageUsage
    system_fingerprint: str = Field(description="Extension: changes whenever the answer to the same request may.")
    seed: int = Field(description="Extension: the request's seed, or the one that was drawn for it.")
    verification: Literal["rejection", "typical"] | None = Field(
        None,
        description="Extension, where the request asked for one of these: the answer is not the one that it would be "
        "without speculation.",
    )
    score: float | None = Field(None, description="Extension, of beam search: what the answer was ranked by.")
    cumulative_logprob: float | None = Field(None, description="Extension, of beam search.")
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class MessageStart(ResponseModel):
    """The first event."""

    type: Literal["message_start"]
    message: AnsweredMessage = Field(description="Without content.")


class Ping(ResponseModel):
    """After the first event, and in silence."""

    type: Literal["ping"]


class BlockStart(ResponseModel):
    """A block begins."""

    type: Literal["content_block_start"]
    index: int = Field(description="Its place in the content.")
    content_block: AnsweredText | AnsweredThinking | AnsweredToolUse = Field(description="Empty.")


class AddedText(ResponseModel):
    """The next piece of a text."""

    type: Literal["text_delta"]
    text: str


class AddedThinking(ResponseModel):
    """The next piece of the thinking."""

    type: Literal["thinking_delta"]
    thinking: str


class AddedSignature(ResponseModel):
    """At the end of the thinking."""

    type: Literal["signature_delta"]
    signature: str


class AddedInput(ResponseModel):
    """The next piece of a call's arguments."""

    type: Literal["input_json_delta"]
    partial_json: str = Field(description="All of them together are a JSON object, unless it was cut off.")


class BlockDelta(ResponseModel):
    """Something is added to a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: AddedText | AddedThinking | AddedSignature | AddedInput


class BlockStop(ResponseModel):
    """A block is complete."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(ResponseModel):
    """Why the message ends."""

    stop_reason: StopReason = Field(description=_STOP_REASON)
    stop_sequence: str | None = Field(description=_STOP_SEQUENCE)
    stop_details: None = Field(description="Always null.")
    container: None = Field(description="Always null.")
    score: float | None = Field(None, description="Extension, of beam search: what the answer was ranked by.")
    cumulative_logprob: float | None = Field(None, description="Extension, of beam search.")


class MessageDelta(ResponseModel):
    """The content is complete."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(ResponseModel):
    """The last event."""

    type: Literal["message_stop"]


class MessageError(ResponseModel):
    """In place of the last events, where something went wrong."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class MessageEvent(
    RootModel[MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageError]
):
    """An event of a streamed message; its `type` stands in the `event:` line as well."""


class TokenCount(ResponseModel):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int = Field(description="Of the prompt, as the chat template writes it.")
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)
