"""Messages of a conversation, as OpenAI's chat completions have them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.rules import EchoedModel, Refused, RequestModel, hint, problem, refused, related, shape
from server.errors import InvalidRequestError
from server.generation.notices import Notice
from server.generation.request import Conversation
from server.generation.tools import CUSTOM_INPUT
from server.http.json_body import parse_json


class TextPart(EchoedModel):
    """A piece of a message's text, or of what the assistant said instead of an answer."""

    type: Literal["text", "refusal"]
    text: str | None = Field(None, description="Of a text: the parts are joined by line breaks.")
    refusal: str | None = Field(None, description="Of a refusal; read as text.")

    @model_validator(mode="after")
    def _has_text(self) -> "TextPart":
        if getattr(self, self.type) is None:
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", self.type)
        return self

    def left_out(self, path: str = "") -> Iterator[Notice]:
        """See RequestModel."""
        yield from super().left_out(path)
        other = "refusal" if self.type == "text" else "text"
        if self.asks(other):
            yield Notice(f"{path}.{other}", f"The part is of the type '{self.type}'.")


Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]


def text_of(content: str | Sequence[TextPart] | None) -> str:
    """The content as one string."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join((part.text if part.type == "text" else part.refusal) or "" for part in content)


def arguments_of(text: str) -> Any:
    """The arguments of a call as an object, because templates write it themselves.

    A text that is no JSON object (a model was cut off, or wrote something else) stays a text.
    """
    if not text:
        return {}
    try:
        value = parse_json(text.encode())
    except InvalidRequestError:
        return text
    return value if isinstance(value, dict) else text


class FunctionCall(EchoedModel):
    """A call that the assistant made earlier."""

    name: str = Field(description="The function that was called.")
    arguments: str = Field(
        description="A JSON object, as text; the chat template is given the object. What is no such object it is given "
        "as text."
    )


class CustomCall(EchoedModel):
    """A call of a custom tool that the assistant made earlier."""

    name: str = Field(description="The tool that was called.")
    input: str = Field(description="The text that it was given.")


class ToolCall(EchoedModel):
    """A tool call in the history of the conversation."""

    id: str | None = Field(None, description="What a tool's message answers.")
    type: Literal["function", "custom"] | None = Field(None, description="`function` by default.")
    function: FunctionCall | None = Field(None, description="The call of a function.")
    custom: CustomCall | None = Field(None, description="The call of a custom tool.")

    @model_validator(mode="after")
    def _has_call(self) -> "ToolCall":
        kind = self.type or "function"
        other = "custom" if kind == "function" else "function"
        if getattr(self, kind) is None:
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", kind)
        if getattr(self, other) is not None:
            message = f"Unknown parameter: '{{path}}'. It belongs to calls of the type '{other}'."
            raise problem("unknown_parameter", message, other)
        return self


class Message(EchoedModel):
    """One message of the conversation. What is unknown in it is left out and reported."""

    role: str = Field(
        min_length=1, max_length=64,
        description="`developer`, `system`, `user`, `assistant`, `tool`, `function`, or another one that the model's "
        "chat template shows. `developer` counts as `system` unless the template knows it, `function` as `tool`.",
    )  # fmt: skip
    content: Content | None = Field(
        None, description="Required, unless the assistant's message has tool_calls or a refusal."
    )
    name: str | None = Field(None, description="Left out and reported if the chat template does not show it.")
    tool_calls: list[ToolCall] | None = Field(
        None,
        min_length=1,
        fail_fast=True,
        description="Of the assistant; written out as text if the template does not show them.",
    )
    tool_call_id: str | None = Field(
        None, description="Of a tool's message, and required there: the call that it answers."
    )
    refusal: str | None = Field(None, description="Of the assistant, without content: read as its text.")
    reasoning_content: str | None = Field(
        None, description="Of the assistant; left out and reported if the chat template does not show it."
    )
    reasoning: str | None = Field(None, description="The same by another name, read where the first is missing.")
    annotations: list[Any] | None = hint("Of the assistant: links in its text.", "Annotations are not read.")
    audio: Refused = refused("Audio of the assistant.")
    function_call: FunctionCall | None = Field(None, description="Older form of tool_calls.")

    @model_validator(mode="after")
    def _fit_role(self) -> "Message":
        if self.role == "tool" and self.tool_call_id is None:
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", "tool_call_id")
        self._only_for("tool", "tool_call_id")
        self._only_for(
            "assistant", "tool_calls", "function_call", "refusal", "reasoning_content", "reasoning", "annotations"
        )
        if self.content is None and not (self.tool_calls or self.function_call or self.refusal):
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", "content")
        return self

    def _only_for(self, role: str, *fields: str) -> None:
        for field in fields:
            if self.role != role and getattr(self, field) is not None:
                message = f"Unknown parameter: '{{path}}'. It belongs to messages of the role '{role}'."
                raise problem("unknown_parameter", message, field)

    def left_out(self, path: str = "") -> Iterator[Notice]:
        """See RequestModel."""
        yield from super().left_out(path)
        if self.refusal and text_of(self.content):
            yield Notice(f"{path}.refusal", "The message has content, which is read instead.")

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it: text as one string, and only the keys that have a value."""
        kept = {"role", "name", "tool_call_id"}
        message: dict[str, Any] = self.model_dump(include=kept, exclude_none=True)
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if self.role == "function":
            message["role"] = "tool"
        calls = [_call_for_template(call) for call in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append({"type": "function", "function": _function_for_template(self.function_call)})
        if calls:
            message["tool_calls"] = calls
        return {**message, "content": text_of(self.content) or self.refusal or ""}


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    of_id = {} if call.id is None else {"id": call.id}
    if call.custom is not None:
        function = {"name": call.custom.name, "arguments": {CUSTOM_INPUT: call.custom.input}}
    else:
        assert call.function is not None
        function = _function_for_template(call.function)
    return {**of_id, "type": "function", "function": function}


def _function_for_template(call: FunctionCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": arguments_of(call.arguments)}


class ConversationFields(RequestModel):
    """A conversation, and how the model's chat template writes it."""

    messages: list[Message] | None = Field(
        None, min_length=1, fail_fast=True, description="A conversation, as in chat completions."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Of messages: open the assistant's turn. `/tokenize` does by default, `/v1/embeddings` does not.",
        json_schema_extra=related(requires=["messages"]),
    )
    continue_final_message: bool | None = Field(
        None, description="Of messages: leave the last one open.",
        json_schema_extra=related(requires=["messages"], excludes=["add_generation_prompt"]),
    )  # fmt: skip
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Of messages: variables that the chat template knows.",
        json_schema_extra=related(requires=["messages"]),
    )  # fmt: skip

    def conversation(self, *, opens_turn: bool, tools: Sequence[Mapping[str, Any]] = ()) -> Conversation | None:
        """The conversation; None without messages. `opens_turn` is the default of `add_generation_prompt`."""
        if self.messages is None:
            return None
        is_open = opens_turn if self.add_generation_prompt is None else self.add_generation_prompt
        return Conversation(
            messages=tuple(message.for_template() for message in self.messages),
            tools=tools,
            variables=self.chat_template_kwargs or {},
            open_turn=is_open and not self.continue_final_message,
            continue_last=bool(self.continue_final_message),
        )
