"""Response schemas of the Responses API: all properties that OpenAI's schema requires, and extensions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType

from server.api.answer_object import AnswerObject, TemplateDate, Warnings, doc
from server.api.openai.answer import CACHE_WRITTEN
from server.api.openai.logprobs import TokenLogprob

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
_ItemId = Annotated[str, doc("Id of the item, for references if the response is stored.")]
_ItemStatus = Annotated[ItemStatus, doc("`incomplete`: the length limit or the end of the response cut it off.")]
_CallId = Annotated[str, doc("Id of the call, for the item with its result.")]
_Namespace = Annotated[str | UnsetType, doc("The tool's namespace, if it has one.")]


class OutputText(AnswerObject, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: Annotated[str, doc("The text.")]
    annotations: Annotated[Sequence[Any], doc("Always empty.")] = ()
    logprobs: Annotated[Sequence[TokenLogprob], doc("Logprobs of each token, if requested.")]


class ReasoningText(AnswerObject, tag_field="type", tag="reasoning_text"):
    """Reasoning as content."""

    text: Annotated[str, doc("The text.")]


class SummaryText(AnswerObject, tag_field="type", tag="summary_text"):
    """Reasoning as a summary."""

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
    summary: Annotated[Sequence[SummaryText], doc("The whole reasoning, if the request has `reasoning.summary`.")] = ()
    content: Annotated[Sequence[ReasoningText] | UnsetType, doc("The whole reasoning, otherwise.")] = UNSET
    encrypted_content: Annotated[str | UnsetType, doc("The reasoning, sealed; if requested.")] = UNSET


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
    input: Annotated[str, doc("The tool's input.")]


OutputPart = OutputText | ReasoningText | SummaryText
OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall


class InputTokensDetails(AnswerObject):
    """Counts of certain input tokens."""

    cached_tokens: Annotated[int, doc("Input tokens that were found in the prefix cache.")]
    cache_write_tokens: Annotated[int, doc(CACHE_WRITTEN)]


class OutputTokensDetails(AnswerObject):
    """Counts of certain output tokens."""

    reasoning_tokens: Annotated[int, doc("Tokens up to the end of the reasoning.")]
    accepted_prediction_tokens: Annotated[int, doc("Extension: draft tokens of any method that became output.")]
    rejected_prediction_tokens: Annotated[int, doc("Extension: draft tokens that were rejected.")]


class ResponseUsage(AnswerObject):
    """Token counts of a response."""

    input_tokens: Annotated[int, doc("Tokens of the whole conversation.")]
    input_tokens_details: InputTokensDetails
    output_tokens: Annotated[int, doc("Tokens of the output, including reasoning.")]
    output_tokens_details: OutputTokensDetails
    total_tokens: Annotated[int, doc("Sum of both.")]


class ResponseFailure(AnswerObject):
    """Why a response failed."""

    code: Annotated[
        Literal["server_error", "rate_limit_exceeded", "invalid_prompt"], doc("What is wrong, for programs.")
    ]
    message: Annotated[str, doc("What is wrong, for people.")]


class IncompleteDetails(AnswerObject):
    """Why a response is incomplete."""

    reason: Annotated[Literal["max_output_tokens"], doc("The token limit or the context's end.")] = "max_output_tokens"


class ReasoningSettings(AnswerObject):
    """Reasoning settings, as in the request."""

    effort: str | None
    summary: str | None


class TextSettings(AnswerObject):
    """Text settings, as in the request."""

    format: Mapping[str, Any]
    verbosity: str | UnsetType = UNSET


class ResponseConversation(AnswerObject):
    """The conversation that the response is part of."""

    id: str


class ResponseObject(AnswerObject):
    """A response, with its effective settings."""

    id: Annotated[str, doc("Unique id of the response.")]
    object: Literal["response"] = "response"
    created_at: Annotated[int, doc("Unix time in seconds.")]
    status: ResponseStatus
    completed_at: Annotated[int | None, doc("Unix time in seconds; null unless `completed`.")] = None
    error: Annotated[ResponseFailure | None, doc("Null unless `failed`.")] = None
    incomplete_details: Annotated[IncompleteDetails | None, doc("Null unless `incomplete`.")] = None
    output: Annotated[Sequence[OutputItem], doc("The items that the model generated, in order.")] = ()
    usage: Annotated[ResponseUsage | None, doc("Null until the response has ended.")] = None
    model: Annotated[str, doc("Name of the served model.")]
    background: bool
    conversation: ResponseConversation | UnsetType = UNSET
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
    tools: Annotated[Sequence[Mapping[str, Any]], doc("The tools that the model could call.")]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | UnsetType = UNSET
    seed: Annotated[int, doc("Extension: the request's seed, or the drawn one.")]
    system_fingerprint: Annotated[
        str, doc("Extension: identifies the model, settings and version that answers depend on.")
    ] = ""
    template_date: TemplateDate = UNSET
    verification: Annotated[Literal["rejection", "typical"] | UnsetType, doc("Extension: as in chat completions.")] = (
        UNSET
    )
    warnings: Warnings = UNSET


class ResponseEvent(AnswerObject):
    """An event of a stream, with OpenAI's types and properties."""

    type: Annotated[str, doc("Type of the event, also in the line `event:`.")]
    sequence_number: Annotated[int, doc("Number of the event, from 0.")]
    response: Annotated[
        ResponseObject | UnsetType,
        doc(
            "In `response.created`, `.queued`, `.in_progress`, and the last event: `.completed`, `.incomplete`, "
            "`.failed`, or `.cancelled`, which is an extension."
        ),
    ] = UNSET
    output_index: Annotated[int | UnsetType, doc("In events of an item: its index in `output`.")] = UNSET
    item: Annotated[OutputItem | UnsetType, doc("The item, in `response.output_item.added` and `.done`.")] = UNSET
    item_id: Annotated[str | UnsetType, doc("In events of an item: its id.")] = UNSET
    content_index: Annotated[int | UnsetType, doc("In events of a part: its index.")] = UNSET
    summary_index: Annotated[int | UnsetType, doc("In events of a summary's part: its index.")] = UNSET
    part: Annotated[OutputPart | UnsetType, doc("The part, in its `.added` and `.done`.")] = UNSET
    delta: Annotated[str | UnsetType, doc("The next piece of a text, in `.delta`.")] = UNSET
    logprobs: Annotated[
        Sequence[TokenLogprob] | UnsetType, doc("Logprobs of the piece's tokens, or of all in `.done`.")
    ] = UNSET
    text: Annotated[str | UnsetType, doc("The whole text, in `.done`.")] = UNSET
    arguments: Annotated[str | UnsetType, doc("All arguments of a call, in `.done`.")] = UNSET
    input: Annotated[str | UnsetType, doc("The whole input of a custom tool, in `.done`.")] = UNSET
    name: Annotated[str | UnsetType, doc("The function, in `.done`.")] = UNSET


class ResponseStreamError(AnswerObject):
    """The event of an error outside of the response."""

    type: Literal["error"] = "error"
    sequence_number: int
    code: str
    message: str
    param: str | None


class InputTokens(AnswerObject):
    """Response schema for POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Annotated[int, doc("Tokens after the chat template, including the tools.")]
    warnings: Warnings = UNSET


class CompactedItem(AnswerObject, tag_field="type", tag="compaction"):
    """The summary of a conversation."""

    id: str
    encrypted_content: Annotated[str, doc("The summary, sealed. Send the item in place of the conversation.")]


class Compaction(AnswerObject):
    """Response schema for POST /v1/responses/compact."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: Annotated[int, doc("Unix time in seconds.")]
    output: Annotated[Sequence[CompactedItem], doc("The items with which to continue the conversation.")]
    usage: ResponseUsage
    seed: Annotated[int, doc("Extension: the drawn seed.")]
    warnings: Warnings = UNSET


class Deleted(AnswerObject):
    """A deleted response or conversation."""

    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True] = True


class ItemList(AnswerObject):
    """A page of items."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[Mapping[str, Any]], doc("The items, as they were sent or generated.")]
    first_id: Annotated[str | None, doc("Id of the first item on the page; null if it is empty.")]
    last_id: Annotated[str | None, doc("Id of the last item on the page, for `after`.")]
    has_more: bool = False
    warnings: Warnings = UNSET


class ConversationObject(AnswerObject):
    """A stored conversation."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: Annotated[int, doc("Unix time in seconds.")]
    metadata: Mapping[str, str]
    warnings: Warnings = UNSET
