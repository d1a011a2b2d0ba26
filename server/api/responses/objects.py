"""What these paths answer: OpenAI's objects with every property that its schema requires, and our extensions."""

from typing import Any, Literal

from pydantic import Field

from server.api.openai.objects import CACHE_WRITTEN, WARNINGS, ReportedNotice, ResponseModel, TokenLogprob

_ITEM_STATUS = "`incomplete`: the length ran out within it, or the response ended."
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseModel):
    """The text of a message."""

    type: Literal["output_text"]
    text: str = Field(description="The text.")
    annotations: list[Any] = Field(description="Always empty.")
    logprobs: list[TokenLogprob] = Field(description="Of each token, where the request asked for them.")


class ReasoningPart(ResponseModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str = Field(description="The text.")


class OutputItem(ResponseModel):
    """What the model did: a message, reasoning or a call."""

    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    id: str = Field(description="By which it can be referred to, if the response is stored.")
    status: ItemStatus = Field(description=_ITEM_STATUS)
    role: Literal["assistant"] | None = Field(None, description="Of a message.")
    content: list[OutputText | ReasoningPart] | None = Field(None, description="Of a message, and of reasoning.")
    summary: list[ReasoningPart] | None = Field(
        None, description="Of reasoning: all of it, with `reasoning.summary` in the request."
    )
    encrypted_content: str | None = Field(None, description="Of reasoning: sealed, where the request asked for that.")
    call_id: str | None = Field(None, description="Of a call: for the item with its result.")
    name: str | None = Field(None, description="Of a call: the tool.")
    namespace: str | None = Field(None, description="Of a call: the namespace of the tool, if it is of one.")
    arguments: str | None = Field(None, description="Of a function's call: a JSON object as text.")
    input: str | None = Field(None, description="Of a custom tool's call: the text for it.")


class InputTokensDetails(ResponseModel):
    """Of the tokens of the input."""

    cached_tokens: int = Field(description="Found in the prefix cache.")
    cache_write_tokens: int = Field(description=CACHE_WRITTEN)


class OutputTokensDetails(ResponseModel):
    """Of the tokens of the output."""

    reasoning_tokens: int = Field(description="Up to the last of the reasoning.")
    accepted_prediction_tokens: int = Field(description="Extension: draft tokens of any method that became output.")
    rejected_prediction_tokens: int = Field(description="Extension: draft tokens that were verified in vain.")


class ResponseUsage(ResponseModel):
    """Tokens that a response took."""

    input_tokens: int = Field(description="Of the whole conversation.")
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(description="Reasoning included.")
    output_tokens_details: OutputTokensDetails
    total_tokens: int = Field(description="Both.")


class ResponseFailure(ResponseModel):
    """Why there is no response."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = Field(description="For programs.")
    message: str = Field(description="For people.")


class IncompleteDetails(ResponseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = Field(description="The most tokens, or the context's end.")


class ReasoningSettings(ResponseModel):
    """As in the request."""

    effort: str | None
    summary: str | None


class TextSettings(ResponseModel):
    """As in the request."""

    format: dict[str, Any]
    verbosity: str | None = None


class OfConversation(ResponseModel):
    """The conversation that the response is part of."""

    id: str


class ResponseObject(ResponseModel):
    """A response, with the settings that were in force."""

    id: str = Field(description="That no other response has.")
    object: Literal["response"]
    created_at: int = Field(description="Unix time in seconds.")
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    completed_at: int | None = Field(description="Unix time in seconds; null unless it is completed.")
    error: ResponseFailure | None = Field(description="Null unless it failed.")
    incomplete_details: IncompleteDetails | None = Field(description="Null unless it is incomplete.")
    output: list[OutputItem] = Field(description="What the model did, in its order.")
    usage: ResponseUsage | None = Field(description="Null until it has ended.")
    model: str = Field(description="Name of the served model.")
    background: bool
    conversation: OfConversation | None = None
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]] = Field(description="Those that the model was offered.")
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None = None
    seed: int = Field(description="Extension: the request's seed, or the one that was drawn for it.")
    system_fingerprint: str = Field(description="Extension: changes whenever the answer to the same request may.")
    verification: Literal["rejection", "typical"] | None = Field(None, description="Extension: see chat completions.")
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class ResponseEvent(ResponseModel):
    """An event of a stream. What it has beside these is as in OpenAI's API."""

    type: str = Field(description="Which it is, as the line `event:` says.")
    sequence_number: int = Field(description="Its number, from 0 on.")
    response: ResponseObject | None = Field(
        None,
        description="With `response.created`, `.queued`, `.in_progress`, and the last: `.completed`, `.incomplete`, "
        "`.failed`, or `.cancelled`, which is an extension.",
    )
    output_index: int | None = Field(None, description="Of an item's events: its place.")
    item: OutputItem | None = Field(None, description="With `response.output_item.added` and `.done`.")
    item_id: str | None = Field(None, description="Of an item's events.")
    content_index: int | None = Field(None, description="Of a part's events.")
    summary_index: int | None = Field(None, description="Of a part's events, of a summary.")
    part: OutputText | ReasoningPart | None = Field(None, description="With the part's `.added` and `.done`.")
    delta: str | None = Field(None, description="The next piece of a text, with `.delta`.")
    logprobs: list[TokenLogprob] | None = Field(None, description="Of the piece's tokens, or of all.")
    text: str | None = Field(None, description="All of a text, with `.done`.")
    arguments: str | None = Field(None, description="All of a call's arguments, with `.done`.")
    input: str | None = Field(None, description="All of a custom tool's input, with `.done`.")
    name: str | None = Field(None, description="The function, with `.done`.")


class InputTokens(ResponseModel):
    """Answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int = Field(description="After the chat template, with the tools.")
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class CompactedItem(ResponseModel):
    """A conversation in short."""

    id: str
    type: Literal["compaction"]
    encrypted_content: str = Field(description="The summary, sealed. The item stands for the conversation.")


class Compaction(ResponseModel):
    """Answer of POST /v1/responses/compact."""

    id: str
    object: Literal["response.compaction"]
    created_at: int = Field(description="Unix time in seconds.")
    output: list[CompactedItem] = Field(description="With what the conversation goes on.")
    usage: ResponseUsage
    seed: int = Field(description="Extension: the one that was drawn for it.")
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class Deleted(ResponseModel):
    """What was forgotten."""

    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True]


class ItemList(ResponseModel):
    """Items, and whether there are more."""

    object: Literal["list"]
    data: list[dict[str, Any]] = Field(description="The items, as they were sent or made.")
    first_id: str | None = Field(description="Null where there is none.")
    last_id: str | None = Field(description="For `after`, to get those behind it.")
    has_more: bool
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class ConversationObject(ResponseModel):
    """A stored conversation."""

    id: str
    object: Literal["conversation"]
    created_at: int = Field(description="Unix time in seconds.")
    metadata: dict[str, str]
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)
