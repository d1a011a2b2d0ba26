"""Answers of these paths: OpenAI's objects with every property that its schema requires, and our extensions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType

from server.api.answer_object import AnswerObject, Warnings, doc
from server.api.openai.answer import CACHE_WRITTEN
from server.api.openai.logprobs import TokenLogprob

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
_ItemId = Annotated[str, doc("By which it can be referred to, if the response is stored.")]
_ItemStatus = Annotated[ItemStatus, doc("`incomplete`: the length ran out within it, or the response ended.")]
_CallId = Annotated[str, doc("For the item with its result.")]
_Namespace = Annotated[str | UnsetType, doc("The namespace of the tool, if it is of one.")]


class OutputText(AnswerObject, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: Annotated[str, doc("The text.")]
    annotations: Annotated[Sequence[Any], doc("Always empty.")] = ()
    logprobs: Annotated[Sequence[TokenLogprob], doc("Of each token, where the request asked for them.")]


class ReasoningText(AnswerObject, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: Annotated[str, doc("The text.")]


class SummaryText(AnswerObject, tag_field="type", tag="summary_text"):
    """The text of reasoning, in a summary."""

    text: Annotated[str, doc("The text.")]


class OutputMessage(AnswerObject, tag_field="type", tag="message"):
    """A message of the model."""

    id: _ItemId
    status: _ItemStatus
    role: Literal["assistant"] = "assistant"
    content: Sequence[OutputText]


class OutputReasoning(AnswerObject, tag_field="type", tag="reasoning"):
    """Reasoning of the model."""

    id: _ItemId
    status: _ItemStatus
    summary: Annotated[Sequence[SummaryText], doc("All of it, with `reasoning.summary` in the request.")] = ()
    content: Annotated[Sequence[ReasoningText] | UnsetType, doc("All of it, otherwise.")] = UNSET
    encrypted_content: Annotated[str | UnsetType, doc("Sealed, where the request asked for that.")] = UNSET


class OutputFunctionCall(AnswerObject, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: _ItemId
    status: _ItemStatus
    call_id: _CallId
    name: Annotated[str, doc("The function.")]
    namespace: _Namespace = UNSET
    arguments: Annotated[str, doc("A JSON object as text.")]


class OutputCustomCall(AnswerObject, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: _ItemId
    status: _ItemStatus
    call_id: _CallId
    name: Annotated[str, doc("The tool.")]
    namespace: _Namespace = UNSET
    input: Annotated[str, doc("The text for it.")]


OutputPart = OutputText | ReasoningText | SummaryText
OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall


class InputTokensDetails(AnswerObject):
    """Of the tokens of the input."""

    cached_tokens: Annotated[int, doc("Found in the prefix cache.")]
    cache_write_tokens: Annotated[int, doc(CACHE_WRITTEN)]


class OutputTokensDetails(AnswerObject):
    """Of the tokens of the output."""

    reasoning_tokens: Annotated[int, doc("Up to the last of the reasoning.")]
    accepted_prediction_tokens: Annotated[int, doc("Extension: draft tokens of any method that became output.")]
    rejected_prediction_tokens: Annotated[int, doc("Extension: draft tokens that were verified in vain.")]


class ResponseUsage(AnswerObject):
    """Tokens that a response took."""

    input_tokens: Annotated[int, doc("Of the whole conversation.")]
    input_tokens_details: InputTokensDetails
    output_tokens: Annotated[int, doc("Reasoning included.")]
    output_tokens_details: OutputTokensDetails
    total_tokens: Annotated[int, doc("Both.")]


class ResponseFailure(AnswerObject):
    """Why there is no response."""

    code: Annotated[Literal["server_error", "rate_limit_exceeded", "invalid_prompt"], doc("For programs.")]
    message: Annotated[str, doc("For people.")]


class IncompleteDetails(AnswerObject):
    """Why a response is incomplete."""

    reason: Annotated[Literal["max_output_tokens"], doc("The most tokens, or the context's end.")] = "max_output_tokens"


class ReasoningSettings(AnswerObject):
    """As in the request."""

    effort: str | None
    summary: str | None


class TextSettings(AnswerObject):
    """As in the request."""

    format: Mapping[str, Any]
    verbosity: str | UnsetType = UNSET


class OfConversation(AnswerObject):
    """The conversation that the response is part of."""

    id: str


class ResponseObject(AnswerObject):
    """A response, with the settings that were in force."""

    id: Annotated[str, doc("That no other response has.")]
    object: Literal["response"] = "response"
    created_at: Annotated[int, doc("Unix time in seconds.")]
    status: ResponseStatus
    completed_at: Annotated[int | None, doc("Unix time in seconds; null unless it is completed.")] = None
    error: Annotated[ResponseFailure | None, doc("Null unless it failed.")] = None
    incomplete_details: Annotated[IncompleteDetails | None, doc("Null unless it is incomplete.")] = None
    output: Annotated[Sequence[OutputItem], doc("What the model did, in its order.")] = ()
    usage: Annotated[ResponseUsage | None, doc("Null until it has ended.")] = None
    model: Annotated[str, doc("Name of the served model.")]
    background: bool
    conversation: OfConversation | UnsetType = UNSET
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: Mapping[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: str | Mapping[str, Any]
    tools: Annotated[Sequence[Mapping[str, Any]], doc("Those that the model was offered.")]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | UnsetType = UNSET
    seed: Annotated[int, doc("Extension: the request's seed, or the one that was drawn for it.")]
    system_fingerprint: Annotated[str, doc("Extension: changes whenever the answer to the same request may.")] = ""
    verification: Annotated[Literal["rejection", "typical"] | UnsetType, doc("Extension: see chat completions.")] = (
        UNSET
    )
    warnings: Warnings = UNSET


class ResponseEvent(AnswerObject):
    """An event of a stream. What it has beside these is as in OpenAI's API."""

    type: Annotated[str, doc("Which it is, as the line `event:` says.")]
    sequence_number: Annotated[int, doc("Its number, from 0 on.")]
    response: Annotated[
        ResponseObject | UnsetType,
        doc(
            "With `response.created`, `.queued`, `.in_progress`, and the last: `.completed`, `.incomplete`, "
            "`.failed`, or `.cancelled`, which is an extension."
        ),
    ] = UNSET
    output_index: Annotated[int | UnsetType, doc("Of an item's events: its place.")] = UNSET
    item: Annotated[OutputItem | UnsetType, doc("With `response.output_item.added` and `.done`.")] = UNSET
    item_id: Annotated[str | UnsetType, doc("Of an item's events.")] = UNSET
    content_index: Annotated[int | UnsetType, doc("Of a part's events.")] = UNSET
    summary_index: Annotated[int | UnsetType, doc("Of a part's events, of a summary.")] = UNSET
    part: Annotated[OutputPart | UnsetType, doc("With the part's `.added` and `.done`.")] = UNSET
    delta: Annotated[str | UnsetType, doc("The next piece of a text, with `.delta`.")] = UNSET
    logprobs: Annotated[Sequence[TokenLogprob] | UnsetType, doc("Of the piece's tokens, or of all.")] = UNSET
    text: Annotated[str | UnsetType, doc("All of a text, with `.done`.")] = UNSET
    arguments: Annotated[str | UnsetType, doc("All of a call's arguments, with `.done`.")] = UNSET
    input: Annotated[str | UnsetType, doc("All of a custom tool's input, with `.done`.")] = UNSET
    name: Annotated[str | UnsetType, doc("The function, with `.done`.")] = UNSET


class ResponseStreamError(AnswerObject):
    """The event of an error that is not the response's."""

    type: Literal["error"] = "error"
    sequence_number: int
    code: str
    message: str
    param: str | None


class InputTokens(AnswerObject):
    """Answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Annotated[int, doc("After the chat template, with the tools.")]
    warnings: Warnings = UNSET


class CompactedItem(AnswerObject, tag_field="type", tag="compaction"):
    """A conversation in short."""

    id: str
    encrypted_content: Annotated[str, doc("The summary, sealed. The item stands for the conversation.")]


class Compaction(AnswerObject):
    """Answer of POST /v1/responses/compact."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: Annotated[int, doc("Unix time in seconds.")]
    output: Annotated[Sequence[CompactedItem], doc("With what the conversation goes on.")]
    usage: ResponseUsage
    seed: Annotated[int, doc("Extension: the one that was drawn for it.")]
    warnings: Warnings = UNSET


class Deleted(AnswerObject):
    """A response or a conversation that was deleted."""

    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True] = True


class ItemList(AnswerObject):
    """Items, and whether there are more."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[Mapping[str, Any]], doc("The items, as they were sent or made.")]
    first_id: Annotated[str | None, doc("Null where there is none.")]
    last_id: Annotated[str | None, doc("For `after`, to get those behind it.")]
    has_more: bool = False
    warnings: Warnings = UNSET


class ConversationObject(AnswerObject):
    """A stored conversation."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: Annotated[int, doc("Unix time in seconds.")]
    metadata: Mapping[str, str]
    warnings: Warnings = UNSET
