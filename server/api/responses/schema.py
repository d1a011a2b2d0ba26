"""Requests for responses: their bodies, the event `response.create` of a websocket, and queries."""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from server.api.fields.generation import MODEL, ConversationFields, OneAnswerFields, ReasoningEffort
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
)
from server.api.fields.structured import FORMS, JsonObjectFormat, NamedSchema, TextFormat
from server.api.fields.structured import constraint_of_schema as of_schema
from server.api.fields.tools import MAX_TOOLS
from server.api.openai.pages import ListQuery, Query
from server.api.responses.items import Input
from server.api.responses.tools import AnyTool, ToolChoice
from server.generation.constraints.fragment import Constraint
from server.generation.constraints.json_schema import JsonObject

_NO_THRESHOLD = "Nothing is compacted by itself; see POST /v1/responses/compact."
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
    """The form of the text."""

    format: Format | None = Field(None, description="Hold the text to a form; any by default.")
    verbosity: Literal["low", "medium", "high"] | None = hint(
        "How long an answer should be.", "The length is not controlled."
    )


class ReasoningConfig(RequestModel):
    """How the model reasons first, and what of it is returned."""

    effort: ReasoningEffort | None = hint(
        "How much to think first. Given to a chat template that has the variable `reasoning_effort`; `none` turns it "
        "off where the template has a switch.", "",
    )  # fmt: skip
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Tell the reasoning as a `summary`, whole and as it is; else it is told as `content`."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Older name of `summary`.", json_schema_extra=related(excludes=["summary"])
    )
    context: Literal["auto", "current_turn", "all_turns"] | None = hint(
        "Which earlier reasoning the model sees.", "The chat template decides.", off=["auto"]
    )
    mode: str | None = hint("How the reasoning is run.", "There is one way.", off=["standard"])

    @property
    def is_summarized(self) -> bool:
        """Whether it is returned as a summary."""
        return (self.summary or self.generate_summary) is not None


class ConversationRef(RequestModel):
    """A stored conversation."""

    id: str


ConversationParam = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[ConversationRef, Tag("<object>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<object>"),
]


class ResponseStreamOptions(RequestModel):
    """How a stream is written."""

    include_obfuscation: bool | None = hint("Padding of the events against traffic analysis.", "Events are not padded.")


class WindowFields(RequestModel):
    """A conversation, or the next part of one that is stored."""

    input: Input | None = Field(
        None, description="A text, or the items of a conversation; required unless an earlier one is named."
    )
    instructions: str | None = Field(None, description="A system message before all others; not carried on.")
    previous_response_id: str | None = Field(
        None, description="A stored response whose conversation goes on.",
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


class InputFields(WindowFields):
    """The input of the model, and the form of its answer."""

    conversation: ConversationParam | None = Field(
        None, description="A stored conversation that goes on; input and output are added to it."
    )
    tools: list[AnyTool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True,
        description="Tools that the model may call. Those that a server would have to run are left out and reported.",
        json_schema_extra=related(excludes=["ignore_eos", "beam_search"]),
    )  # fmt: skip
    tool_choice: ToolChoice | None = Field(
        None,
        description="`auto`, the default with tools: text or calls. `none`: no calls; the model is not told of the "
        "tools. `required`: calls only. A tool: a call of that one. `allowed_tools`: calls of these only.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls; by default yes.")
    text: TextConfig | None = Field(None, description="The form of the text.")
    reasoning: ReasoningConfig | None = Field(None, description="How to think first.")
    truncation: Literal["auto", "disabled"] | None = hint(
        "What happens to a conversation that does not fit.", "All of it is counted.", off=["disabled"]
    )

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation


class CountInputTokens(InputFields):
    """The request of POST /v1/responses/input_tokens."""

    model: str | None = Field(None, description="The served model when left out.")
    personality: str | None = hint("How the model is to sound.", "The model has one personality.")


class CompactResponse(WindowFields, AccountFields):
    """The request of POST /v1/responses/compact."""

    model: str | None = Field(None, description=MODEL)
    image: Opaque | None = hint("How images are read.", "There are no images.")


class CreateResponse(InputFields, AccountFields, ConversationFields, OneAnswerFields):
    """OpenAI's fields with OpenAI's limits, and the extensions under vLLM's names."""

    max_output_tokens: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="By default half of the context, at most 32,768 tokens, and never more than its rest.",
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description="Of a conversation that does not fit, `auto` leaves out the oldest messages and reports it; else "
        "it is refused.",
    )
    max_tool_calls: int | None = no_effect("Counts calls of hosted tools, of which there are none.", ge=1)
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Report the log-probabilities of the text's tokens, and of so many alternatives."
    )
    include: list[Includable] | None = Field(
        None,
        description="`reasoning.encrypted_content`: the reasoning sealed, for clients that send it back. "
        "`message.output_text.logprobs`: log-probabilities. The others ask for results of hosted tools.",
    )
    store: bool | None = Field(None, description="Keep the response, so that it can be found by its id; on by default.")
    background: bool | None = Field(
        None, description="Answer at once, and go on without the client.",
    )  # fmt: skip
    stream_options: ResponseStreamOptions | None = Field(
        None, description="How the stream is written.", json_schema_extra=related(requires=["stream"])
    )
    user: EndUser | None = no_effect("Your own id of the end user.")
    client_metadata: Opaque | None = no_effect("The client's own notes.")

    context_management: OpaqueList | None = hint("When to compact.", _NO_THRESHOLD)
    background_options: Opaque | None = hint("When to be ready.", "Background responses start at once.")
    access_programs: Opaque | None = hint("Access to models.", "There are no such programs.")
    image: Opaque | None = hint("How images are read.", "There are no images.")
    moderation: Refused = refused("Moderation.")
    prompt: Refused = refused("Stored templates of prompts.")

    @model_validator(mode="after")
    def _check_background(self) -> Self:
        if self.background and self.store is False:
            message = "Invalid '{path}': a response in the background has to be stored, and 'store' is false."
            raise problem("invalid_parameter_combination", message, "background")
        return self

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        form = self._format
        other = next((name for name in (*FORMS, "ignore_eos") if form is not None and self.asks(name)), None)
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
                return of_schema(named, "text.format.schema")
            case JsonObjectFormat():
                return JsonObject()
        return super().constraint

    @property
    def includes(self) -> frozenset[str]:
        """The optional parts that the answer shall have."""
        return frozenset(self.include or ())

    @property
    def is_stored(self) -> bool:
        """Whether the response is kept."""
        return self.store is not False


STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


def _check_stream_id(value: str) -> str:
    if STREAM_ID.fullmatch(value) is None:
        message = "Invalid '{path}': it needs 1 to 256 characters, all of them letters, digits, '_', '-' or '.'."
        raise problem("invalid_stream_id", message)
    return value


class CreateEvent(CreateResponse):
    """The event `response.create`, by which a client asks for a response over a websocket."""

    type: Literal["response.create"]
    stream_id: Annotated[str, AfterValidator(_check_stream_id)] | None = Field(
        None,
        description="The lane: responses of one lane follow each other, others run side by side. Their events have it.",
    )
    generate: bool | None = Field(
        None, description="If false, the input is read and kept for a later turn, and there is no output."
    )
    stream: Annotated[Literal[True] | None, SUPPORTED_VALUES_ONLY] = Field(
        None, description="Every answer over a websocket is a stream."
    )
    background: Annotated[Literal[False] | None, SUPPORTED_VALUES_ONLY] = Field(
        None, description="Not over a websocket."
    )
    stream_options: ResponseStreamOptions | None = Field(None, description="How the stream is written.")


class RetrieveQuery(Query):
    """The query of GET /v1/responses/{response_id}."""

    lists: ClassVar[frozenset[str]] = frozenset({"include"})

    include: list[str] | None = no_effect("What is stored is told whole.")
    stream: bool = Field(False, description="As the events of its stream.")
    starting_after: int | None = Field(
        None,
        ge=0,
        description="Of these, those after the one of this number.",
        json_schema_extra=related(requires=["stream"]),
    )
    include_obfuscation: bool | None = no_effect("Events are not padded.")


class ItemsQuery(ListQuery):
    """The query of lists of items."""

    lists: ClassVar[frozenset[str]] = frozenset({"include"})

    include: list[str] | None = no_effect("What is stored is told whole.")
