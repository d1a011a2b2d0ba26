"""The request of POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticKnownError

from server.errors import InvalidRequestError
from server.api.fields.sampling import SamplingFields
from server.api.fields.rules import (
    SUPPORTED_ONLY,
    SUPPORTED_VALUES_ONLY,
    Refused,
    RequestModel,
    at_most,
    no_effect,
    problem,
    refused,
    related,
    shape,
)
from server.http.strict_json import parse_json


class TextPart(RequestModel):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str = Field(description="The parts of a text are joined by line breaks.")


Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]


def text_of(content: str | list[TextPart] | None) -> str:
    """The content as one string."""
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""


def _decode_arguments(text: object) -> object:
    """What the text stands for; an empty one, for no arguments."""
    if not isinstance(text, str):
        raise PydanticKnownError("string_type")
    try:
        value = parse_json(text.encode()) if text else {}
    except InvalidRequestError:
        value = None
    if not isinstance(value, dict):
        raise problem("invalid_value", "Invalid '{path}': Expected a string that is a JSON object.")
    return value


class FunctionCall(RequestModel):
    """A call that the assistant made earlier."""

    name: str = Field(description="The function that was called.")
    arguments: Annotated[dict[str, Any], BeforeValidator(_decode_arguments, json_schema_input_type=str)] = Field(
        description="A JSON object, as text. The chat template is given the object."
    )


class ToolCall(RequestModel):
    """A tool call in the history of the conversation."""

    id: str = Field(description="What a tool's message answers.")
    type: Literal["function"]
    function: FunctionCall = Field(description="The call.")


class Message(RequestModel):
    """One message of the conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool"] = Field(
        description="`developer` counts as `system` unless the chat template knows it."
    )
    content: Content | None = Field(
        None, description="Required, unless the assistant's message has tool_calls or a refusal."
    )
    name: str | None = Field(None, description="Refused if the chat template does not show it.")
    tool_calls: list[ToolCall] | None = Field(
        None, min_length=1, fail_fast=True, description="Of the assistant; refused if the template does not show them."
    )
    tool_call_id: str | None = Field(
        None, description="Of a tool's message, and required there: the call that it answers."
    )
    refusal: str | None = Field(None, description="Of the assistant; refused if the template does not show it.")
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = no_effect("Empty, as in this server's answers.")
    audio: Refused = refused("Audio of the assistant.")
    function_call: Refused = refused("Deprecated; see tool_calls.")

    @model_validator(mode="after")
    def _fit_role(self) -> "Message":
        if self.role == "tool" and self.tool_call_id is None:
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", "tool_call_id")
        self._only_for("tool", "tool_call_id")
        self._only_for("assistant", "tool_calls", "refusal", "annotations")
        if self.content is None and not (self.tool_calls or self.refusal):
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", "content")
        return self

    def _only_for(self, role: str, *fields: str) -> None:
        for field in fields:
            if self.role != role and getattr(self, field) is not None:
                message = f"Unknown parameter: '{{path}}'. It belongs to messages of the role '{role}'."
                raise problem("unknown_parameter", message, field)

    @property
    def text(self) -> str:
        """The content as one string."""
        return text_of(self.content)


class TextFormat(RequestModel):
    """The one format that asks for nothing."""

    type: Literal["text"]


class Prediction(RequestModel):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: Content = Field(description="The text.")

    @property
    def text(self) -> str:
        """The content as one string."""
        return text_of(self.content)


class ChatCompletionRequest(SamplingFields):
    """OpenAI's fields with OpenAI's limits, and the extensions under vLLM's names."""

    messages: list[Message] = Field(min_length=1, fail_fast=True, description="The conversation, oldest first.")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="By default the rest of the context."
    )
    max_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Older name of max_completion_tokens.",
        json_schema_extra=related(excludes=["max_completion_tokens"]),
    )  # fmt: skip
    logprobs: bool | None = Field(None, description="Report the log-probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="And of so many alternatives.", json_schema_extra=related(requires=["logprobs"])
    )

    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn; on by default.")
    continue_final_message: bool | None = Field(
        None, description="Continue the last message instead of answering it.",
        json_schema_extra=related(excludes=["add_generation_prompt"]),
    )  # fmt: skip
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables that the chat template knows.")

    prediction: Prediction | None = Field(
        None,
        description="What the answer will probably be: where that is right, it comes faster. Only with speculation by "
        "`prediction`, which is then the default, or `auto`.",
        examples=[{"type": "content", "content": "def add(a, b):\n    return a + b\n"}],
    )

    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None, at_most(16)
    ] = no_effect("Up to 16 pairs of strings.")
    modalities: Annotated[list[Literal["text"]] | None, Field(min_length=1, max_length=1), SUPPORTED_VALUES_ONLY] = (
        no_effect("Text is the only one.")
    )
    parallel_tool_calls: bool | None = no_effect("There are no tools yet.")
    prompt_cache_key: str | None = no_effect("Prefixes are found without it.")
    prompt_cache_retention: Annotated[Literal["in_memory"] | None, SUPPORTED_VALUES_ONLY] = no_effect("In memory only.")
    safety_identifier: str | None = no_effect("Your own id of the end user.", max_length=64)
    service_tier: Annotated[Literal["auto", "default"] | None, SUPPORTED_VALUES_ONLY] = no_effect("There is one tier.")
    store: Annotated[Literal[False] | None, SUPPORTED_VALUES_ONLY] = no_effect("Nothing is stored.")
    tool_choice: Annotated[Literal["none", "auto"] | None, SUPPORTED_ONLY] = refused("Tools come later.")
    function_call: Annotated[Literal["none", "auto"] | None, SUPPORTED_ONLY] = refused("Tools come later.")
    response_format: Annotated[TextFormat | None, SUPPORTED_ONLY] = refused("Other formats than text come later.")

    audio: Refused = refused("Audio output.")
    functions: Refused = refused("Tools come later.")
    moderation: Refused = refused("Moderation.")
    prompt_cache_options: Refused = refused("Control of the prompt cache.")
    reasoning_effort: Refused = refused("Reasoning comes later.")
    tools: Refused = refused("Tools come later.")
    verbosity: Refused = refused("Control of the length.")
    web_search_options: Refused = refused("Web search.")
    best_of: Annotated[Literal[1] | None, SUPPORTED_ONLY] = refused("Choosing the best of several outputs.")
    chat_template: Refused = refused("Templates of the request's own.")
    documents: Refused = refused("Documents for the template.")

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt
