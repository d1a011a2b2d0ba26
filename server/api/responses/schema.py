"""Request schemas of the Responses API: bodies, a websocket's event `response.create`, and queries."""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from server.api.fields.decoding import NumAlternatives
from server.api.fields.foreign import NPredict, NProbs, NumPredict
from server.api.fields.generation import MAX_TOKENS, MODEL, ConversationFields, OneAnswerFields, ReasoningEffort
from server.api.fields.openai import AccountFields, EndUser
from server.api.fields.rules import (
    SUPPORTED_VALUES_ONLY,
    Opaque,
    OpaqueList,
    Refused,
    RequestModel,
    hint,
    no_effect,
    problem,
    refused,
    related,
    same_as,
)
from server.api.fields.structured import CONSTRAINT_FIELDS, JsonObjectFormat, NamedSchema, TextFormat
from server.api.fields.structured import constraint_of_schema as of_schema
from server.api.fields.tools import MAX_TOOLS, TOOL_CHOICE, HiddenTools
from server.api.openai.pages import ListQuery, Query
from server.api.responses.items import Input
from server.api.responses.tools import AnyTool, ToolChoice
from server.generation.constraints.fragment import Constraint
from server.generation.constraints.json_schema import JsonObject

_NO_THRESHOLD = "Conversations are compacted only by POST /v1/responses/compact."
Includable = Literal[
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
    "reasoning.encrypted_content", "message.output_text.logprobs",
]  # fmt: skip


class JsonSchemaFormat(NamedSchema):
    """JSON by a schema."""

    type: Literal["json_schema"]


def _format_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "text")
    return f"<{kind}>"


Format = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(_format_tag),
]


class TextConfig(RequestModel):
    """Format of the text."""

    format: Format | None = Field(None, description="Constrain the text; any text by default.")
    verbosity: Literal["low", "medium", "high"] | None = hint(
        "How long an answer should be.", "The length is not controlled."
    )


class ReasoningConfig(RequestModel):
    """Reasoning settings: how much, and how it is returned."""

    effort: ReasoningEffort | None = hint(
        "How much to think first. Passed to a chat template that has the variable `reasoning_effort`; `none` turns "
        "thinking off if the template has a switch.", "",
    )  # fmt: skip
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Return the whole, unchanged reasoning as `summary`. By default it is `content`."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = same_as("summary", "Older name.")
    context: Literal["auto", "current_turn", "all_turns"] | None = hint(
        "The earlier reasoning that the model sees.", "The chat template decides.", off=["auto"]
    )
    mode: str | None = hint("Mode of the reasoning.", "There is one mode.", off=["standard"])

    @property
    def is_summarized(self) -> bool:
        """Whether the reasoning is returned as a summary."""
        return (self.summary or self.generate_summary) is not None


class ConversationRef(RequestModel):
    """A reference to a stored conversation."""

    id: str


ConversationParam = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[ConversationRef, Tag("<object>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<object>"),
]


class ResponseStreamOptions(RequestModel):
    """Options of a stream."""

    include_obfuscation: bool | None = hint("Padding of the events against traffic analysis.", "Events are not padded.")


class HistoryFields(RequestModel):
    """A conversation, or the continuation of a stored one."""

    input: Input | None = Field(
        None, description="A text, or items of a conversation; required without a stored conversation or response."
    )
    instructions: str | None = Field(
        None, description="A system message before all others; later responses do not inherit it."
    )
    previous_response_id: str | None = Field(
        None, description="The stored response whose conversation to continue.",
        json_schema_extra=related(excludes=["conversation"]),
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if self.input is None and self.previous_response_id is None and self.conversation_id is None:
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", "input")
        return self

    @property
    def conversation_id(self) -> str | None:
        """The id of the stored conversation."""
        return None


class InputFields(HiddenTools, HistoryFields):
    """The model's input, and the format of its answer."""

    conversation: ConversationParam | None = Field(
        None, description="The stored conversation to continue; input and output are added to it."
    )
    tools: list[AnyTool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True,
        description="Tools that the model may call. Hosted tools are ignored and reported.",
        json_schema_extra=related(excludes=["ignore_eos", "beam_search"]),
    )  # fmt: skip
    tool_choice: ToolChoice | None = Field(
        None,
        description=TOOL_CHOICE,
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls; on by default.")
    text: TextConfig | None = Field(None, description="Format of the text.")
    reasoning: ReasoningConfig | None = Field(None, description="Reasoning settings.")
    truncation: Literal["auto", "disabled"] | None = hint(
        "Treatment of a conversation that is too long.", "The whole conversation is counted.", off=["disabled"]
    )

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation


class CountInputTokens(InputFields):
    """Request schema for POST /v1/responses/input_tokens."""

    model: str | None = Field(None, description="Name of the served model; optional.")
    personality: str | None = hint("Personality of the model.", "The model has one personality.")


class CompactResponse(HistoryFields, AccountFields):
    """Request schema for POST /v1/responses/compact."""

    model: str | None = Field(None, description=MODEL)
    image: Opaque | None = hint("Options for processing images.", "The model's own image processor is used unchanged.")


class CreateResponse(InputFields, AccountFields, ConversationFields, OneAnswerFields):
    """Request schema for POST /v1/responses: OpenAI's fields and limits, and extensions under vLLM's names."""

    max_output_tokens: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description=MAX_TOKENS,
    )
    n_predict: NPredict = same_as("max_output_tokens", "llama.cpp's name; -1 is no limit.")
    num_predict: NumPredict = same_as("max_output_tokens", "Ollama's name; 0 or less is no limit.")
    n_probs: NProbs = same_as("top_logprobs", "llama.cpp's name; 0 reports nothing.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description="If a conversation does not fit, `auto` drops its oldest messages and reports it. `disabled`, the "
        "default, refuses it.",
    )
    max_tool_calls: int | None = no_effect("The most calls of hosted tools, which this server does not have.", ge=1)
    top_logprobs: NumAlternatives | None = Field(
        None,
        description="Report the log-probabilities of the text's tokens and of this many alternatives, at most the "
        "setting `max_logprobs`.",
    )
    include: list[Includable] | None = Field(
        None,
        description="`reasoning.encrypted_content`: sealed reasoning, for clients that send it back. "
        "`message.output_text.logprobs`: log-probabilities. Other values are about hosted tools and add nothing.",
    )
    store: bool | None = Field(
        None, description="Store the response, so that it can be retrieved by its id; on by default."
    )
    background: bool | None = Field(
        None, description="Answer at once with a pending response, and generate it in the background.",
    )  # fmt: skip
    stream_options: ResponseStreamOptions | None = Field(
        None, description="Options of the stream.", json_schema_extra=related(requires=["stream"])
    )
    user: EndUser | None = no_effect("Your own id for the end user.")
    client_metadata: Opaque | None = no_effect("The client's own notes.")

    context_management: OpaqueList | None = hint("When to compact.", _NO_THRESHOLD)
    background_options: Opaque | None = hint(
        "Scheduling of a background response.", "Background responses start at once."
    )
    access_programs: Opaque | None = hint("Access programs for models.", "There are no access programs.")
    image: Opaque | None = hint("Options for processing images.", "The model's own image processor is used unchanged.")
    moderation: Refused = refused("Moderation.")
    prompt: Refused = refused("Stored prompt templates.")

    @model_validator(mode="after")
    def _check_background(self) -> Self:
        if self.background and self.store is False:
            message = "Invalid '{path}': a background response must be stored, but 'store' is false."
            raise problem("invalid_parameter_combination", message, "background")
        return self

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        form = self._format
        other = next(
            (name for name in (*CONSTRAINT_FIELDS, "ignore_eos") if form is not None and self.asks(name)), None
        )
        if other is not None:
            message = f"Setting 'text.format' and '{other}' at the same time is not supported."
            raise problem("invalid_parameter_combination", message, "text.format")
        return self

    @property
    def _format(self) -> JsonObjectFormat | JsonSchemaFormat | None:
        asked = None if self.text is None else self.text.format
        return None if isinstance(asked, TextFormat) else asked

    @property
    def constrained_by(self) -> str | None:
        return "text.format" if self._format is not None else super().constrained_by

    @property
    def constraint(self) -> Constraint | None:
        match self._format:
            case JsonSchemaFormat() as named:
                return of_schema(named, "text.format.schema", self.json_style)
            case JsonObjectFormat():
                return JsonObject()
        return super().constraint

    @property
    def includes(self) -> frozenset[str]:
        """The optional parts of the answer that are requested."""
        return frozenset(self.include or ())

    @property
    def is_stored(self) -> bool:
        """Whether the response is stored."""
        return self.store is not False


STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


def _check_stream_id(value: str) -> str:
    if STREAM_ID.fullmatch(value) is None:
        message = "Invalid '{path}': expected 1 to 256 characters, each a letter, a digit, '_', '-' or '.'."
        raise problem("invalid_stream_id", message)
    return value


class CreateEvent(CreateResponse):
    """The event `response.create`, which requests a response over a websocket."""

    type: Literal["response.create"]
    stream_id: Annotated[str, AfterValidator(_check_stream_id)] | None = Field(
        None,
        description="Name of the lane. Responses of one lane run one after the other. Their events have it.",
    )
    generate: bool | None = Field(
        None, description="`false`: only compute the input and remember it for a later turn, without output."
    )
    stream: Annotated[Literal[True] | None, SUPPORTED_VALUES_ONLY] = Field(
        None, description="Always true over a websocket."
    )
    background: Annotated[Literal[False] | None, SUPPORTED_VALUES_ONLY] = Field(
        None, description="Not supported over a websocket."
    )
    stream_options: ResponseStreamOptions | None = Field(None, description="Options of the stream.")


class RetrieveQuery(Query):
    """Query of GET /v1/responses/{response_id}."""

    lists: ClassVar[frozenset[str]] = frozenset({"include"})

    include: list[str] | None = no_effect("Stored objects are always returned whole.")
    stream: bool = Field(False, description="Return the events of the response's stream.")
    starting_after: int | None = Field(
        None,
        ge=0,
        description="With `stream`: return the events after the one with this number.",
        json_schema_extra=related(requires=["stream"]),
    )
    include_obfuscation: bool | None = no_effect("Events are not padded.")


class ItemsQuery(ListQuery):
    """Query of a list of items."""

    lists: ClassVar[frozenset[str]] = frozenset({"include"})

    include: list[str] | None = no_effect("Stored objects are always returned whole.")
