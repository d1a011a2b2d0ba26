"""Messages of a conversation, in the format of OpenAI's chat completions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.images import ImagePart
from server.api.fields.rules import (
    EchoedModel,
    Refused,
    RequestModel,
    hint,
    no_effect,
    problem,
    refused,
    related,
    shape,
    tag_by_type,
)
from server.errors import InvalidRequestError
from server.generation.notices import Notice
from server.generation.request import Conversation
from server.generation.sent_images import SentImage, SentImages
from server.generation.tools import CUSTOM_INPUT
from server.http.json_body import parse_json
from server.text.image_marks import joined


class TextPart(EchoedModel):
    """A part of a message: a text, under the names of several APIs, or a refusal by the assistant."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = Field(None, description="The text, but of a `refusal`. Parts are joined by line breaks.")
    refusal: str | None = Field(None, description="The text of a `refusal` part, treated as text.")

    @model_validator(mode="after")
    def _has_text(self) -> "TextPart":
        name = "refusal" if self.type == "refusal" else "text"
        if getattr(self, name) is None:
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", name)
        return self

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield from super().ignored(path)
        other = "text" if self.type == "refusal" else "refusal"
        if self.asks(other):
            yield Notice(f"{path}.{other}", f"The part has the type '{self.type}'.")

    @property
    def content(self) -> str:
        """The text of the part."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


TextContent = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]


class ThinkingPart(EchoedModel):
    """Thinking of the assistant, in the format of Anthropic or Mistral; the same as `reasoning_content`."""

    type: Literal["thinking"]
    thinking: TextContent = Field(description="The text.")
    signature: str | None = no_effect("The signature, which is not verified.")


class HostedPart(EchoedModel):
    """A part that only another server can use, such as a call of a tool that it ran: ignored and reported."""

    type: Literal[
        "redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
        "code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
        "tool_search_tool_result", "mcp_tool_use", "mcp_tool_result", "container_upload",
    ]  # fmt: skip

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield Notice(path, f"Parts of the type '{self.type}' belong to another server, and this one cannot use them.")


HOSTED_PARTS = frozenset(HostedPart.model_fields["type"].annotation.__args__)  # type: ignore[union-attr]
HOSTED_TAG = "<any of another server>"


def part_tag(value: object) -> str:
    """The tag of a part, with one for all that only another server can use."""
    tag = tag_by_type("text")(value)
    return HOSTED_TAG if tag[1:-1] in HOSTED_PARTS else tag


Part = TextPart | ImagePart | ThinkingPart | HostedPart
_TaggedPart = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[TextPart, Tag("<input_text>")]
    | Annotated[TextPart, Tag("<output_text>")]
    | Annotated[TextPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image_url>")]
    | Annotated[ThinkingPart, Tag("<thinking>")]
    | Annotated[HostedPart, Tag(HOSTED_TAG)],
    Discriminator(part_tag),
]
Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[_TaggedPart], Field(fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]


def text_of(content: str | Sequence[Part] | None) -> str:
    """The text of the content as one string, without images."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.content for part in content if isinstance(part, TextPart))


def content_of(content: str | Sequence[Part] | None, images: SentImages, path: str) -> str:
    """The content as one string, with marks for its images, which are added to `images`.

    Raises InvalidRequestError.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return joined(
        part.content if isinstance(part, TextPart) else part.mark(images, f"{path}[{index}]")
        for index, part in enumerate(content)
        if isinstance(part, TextPart | ImagePart)
    )


def thoughts_of(content: str | Sequence[object] | None) -> str | None:
    """The thinking in the content; None: none."""
    parts = () if content is None or isinstance(content, str) else content
    return "\n".join(text_of(part.thinking) for part in parts if isinstance(part, ThinkingPart)) or None


def arguments_of(text: str) -> Any:
    """The arguments of a call as an object, because templates convert it to text themselves.

    Text that is not a JSON object (a model was cut off, or wrote something else) is returned unchanged.
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
        description="A JSON object, as text. The chat template gets the object, or the text if it is not a JSON object."
    )


class CustomCall(EchoedModel):
    """A call of a custom tool that the assistant made earlier."""

    name: str = Field(description="The tool that was called.")
    input: str = Field(description="The tool's input.")


class ToolCall(EchoedModel):
    """A tool call in the history of the conversation."""

    id: str | None = Field(None, description="Id of the call, which the message with its result names.")
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


_MAY_BE_EMPTY = ("assistant", "tool", "function")
"""Roles whose messages need no content: a call or a result may have none."""


class Message(EchoedModel):
    """A message of the conversation. Unknown fields are ignored and reported."""

    role: str = Field(
        min_length=1, max_length=64,
        description="`developer`, `system`, `user`, `assistant`, `tool`, `function`, or another role that the chat "
        "template supports. `developer` is treated as `system` unless the template supports it, `function` as `tool`.",
    )  # fmt: skip
    content: Content | None = Field(
        None, description="Required in messages of the user and the system. Otherwise, null is an empty text."
    )
    name: str | None = Field(None, description="Ignored and reported if the chat template does not show it.")
    tool_calls: list[ToolCall] | None = Field(
        None,
        fail_fast=True,
        description="Calls by the assistant; written as text if the chat template does not support calls.",
    )
    tool_call_id: str | None = Field(None, description="Id of the call that a tool's message answers; required there.")
    refusal: str | None = Field(None, description="Refusal by the assistant; used as text without content.")
    reasoning_content: str | None = Field(
        None, description="Reasoning of the assistant; ignored and reported if the chat template does not show it."
    )
    reasoning: str | None = Field(None, description="Same as `reasoning_content`, which takes precedence.")
    annotations: list[Any] | None = hint("Links in the assistant's text.", "Annotations are not used.")
    audio: Refused = refused("Audio of the assistant.")
    function_call: FunctionCall | None = Field(None, description="Older form of `tool_calls`.")

    @model_validator(mode="after")
    def _fit_role(self) -> "Message":
        if self.role == "tool" and self.tool_call_id is None:
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", "tool_call_id")
        self._only_for("tool", "tool_call_id")
        self._only_for(
            "assistant", "tool_calls", "function_call", "refusal", "reasoning_content", "reasoning", "annotations"
        )
        if self.content is None and self.role not in _MAY_BE_EMPTY:
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", "content")
        return self

    def _only_for(self, role: str, *fields: str) -> None:
        for field in fields:
            if self.role != role and getattr(self, field) not in (None, []):
                message = f"Unknown parameter: '{{path}}'. It belongs to messages of the role '{role}'."
                raise problem("unknown_parameter", message, field)

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield from super().ignored(path)
        if self.refusal and text_of(self.content):
            yield Notice(f"{path}.refusal", "The message has content, which takes precedence.")

    def for_template(self, images: SentImages, path: str) -> dict[str, Any]:
        """The message for a chat template: content as one string, and only keys that have a value.

        Its images are added to `images`. Raises InvalidRequestError for an image that cannot be read.
        """
        kept = {"role", "name", "tool_call_id"}
        message: dict[str, Any] = self.model_dump(include=kept, exclude_none=True)
        sent = (self.reasoning_content, self.reasoning, thoughts_of(self.content))
        reasoning = next((text for text in sent if text is not None), None)
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if self.role == "function":
            message["role"] = "tool"
        calls = [_call_for_template(call) for call in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append({"type": "function", "function": _function_for_template(self.function_call)})
        if calls:
            message["tool_calls"] = calls
        return {**message, "content": content_of(self.content, images, f"{path}.content") or self.refusal or ""}


def for_template(messages: Sequence[Message]) -> tuple[Sequence[dict[str, Any]], Sequence[SentImage]]:
    """Messages for a chat template, and their images. Raises InvalidRequestError for an image that cannot be read."""
    images = SentImages()
    made = [message.for_template(images, f"messages[{index}]") for index, message in enumerate(messages)]
    return made, images.all


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
    """A conversation, and options of the chat template."""

    messages: list[Message] | None = Field(
        None, min_length=1, fail_fast=True, description="A conversation, as in chat completions."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="With `messages`: open the assistant's turn. Default: on in `/tokenize`, off in `/v1/embeddings`.",
        json_schema_extra=related(requires=["messages"]),
    )
    continue_final_message: bool | None = Field(
        None, description="With `messages`: leave the last message open.",
        json_schema_extra=related(requires=["messages"], excludes=["add_generation_prompt"]),
    )  # fmt: skip
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="With `messages`: variables of the chat template.",
        json_schema_extra=related(requires=["messages"]),
    )  # fmt: skip

    def conversation(self, *, opens_turn: bool, tools: Sequence[Mapping[str, Any]] = ()) -> Conversation | None:
        """The conversation; None without messages. `opens_turn` is the default of `add_generation_prompt`."""
        if self.messages is None:
            return None
        is_open = opens_turn if self.add_generation_prompt is None else self.add_generation_prompt
        messages, images = for_template(self.messages)
        return Conversation(
            messages=messages,
            images=images,
            tools=tools,
            variables=self.chat_template_kwargs or {},
            open_turn=is_open and not self.continue_final_message,
            continue_last=bool(self.continue_final_message),
        )
