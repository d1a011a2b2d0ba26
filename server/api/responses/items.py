"""Items of a conversation in requests: the client's own, and items of earlier responses."""

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.images import DETAIL, URL, Detail, add_url
from server.api.fields.messages import HOSTED_PARTS, HOSTED_TAG, HostedPart, ThinkingPart
from server.api.fields.rules import EchoedModel, hint, no_effect, problem, shape
from server.api.fields.tools import MAX_TOOLS
from server.api.responses.tools import AnyTool
from server.errors import InvalidRequestError
from server.generation.notices import Notice
from server.generation.sent_images import SentImage, SentImages
from server.http.json_body import parse_json
from server.text.image_marks import joined

_SEAL_VERSION = 1
_TEXTS = {"refusal": "refusal"}
"""The property with the text, for part types that do not use `text`."""
ItemId = Annotated[str, Field(max_length=64)]
"""An item's id, at most as long as OpenAI allows."""
_NO_MEDIA = "Unsupported value: '{path}' is neither text nor an image, and this server accepts only these."


class Part(EchoedModel):
    """A text part of a message."""

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str | None = Field(None, description="The text. Parts of a message are joined by line breaks.")
    refusal: str | None = Field(None, description="The text of a `refusal` part, treated as text.")
    annotations: list[Any] | None = hint("Links in the assistant's text.", "Annotations are not used.")
    logprobs: list[Any] | None = no_effect("Log-probabilities of the assistant's tokens.")

    @model_validator(mode="after")
    def _has_text(self) -> "Part":
        name = _TEXTS.get(self.type, "text")
        if getattr(self, name) is None:
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", name)
        return self

    @property
    def content(self) -> str:
        """The text of the part."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


class InputImagePart(EchoedModel):
    """An image."""

    type: Literal["input_image"]
    image_url: str | None = Field(None, description=URL)
    file_id: str | None = Field(None, description="Id of an uploaded image, in place of `image_url`.")
    detail: Detail | None = Field(None, description=DETAIL)

    @model_validator(mode="after")
    def _has_image(self) -> "InputImagePart":
        if self.image_url is None and self.file_id is None:
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", "image_url")
        if self.image_url is not None and self.file_id is not None:
            message = "Setting 'image_url' and 'file_id' at the same time is not supported."
            raise problem("invalid_parameter_combination", message, "file_id")
        return self

    def mark(self, images: SentImages, path: str) -> str:
        """Add the image to the others; returns its mark. Raises InvalidRequestError."""
        if self.file_id is not None:
            sent = SentImage("input_image", b"", path, f"{path}.file_id", self.file_id, detail=self.detail or "")
            return images.add(sent)
        return add_url(self.image_url or "", "input_image", images, path, f"{path}.image_url", self.detail or "")


class MediaPart(EchoedModel):
    """A part that is neither text nor an image: refused."""

    type: str

    @model_validator(mode="after")
    def _refuse(self) -> "MediaPart":
        raise problem("unsupported_value", _NO_MEDIA, "type")


def _part_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind == "input_image":
        return "<input_image>"
    if kind == "thinking":
        return "<thinking>"
    if isinstance(kind, str) and kind in HOSTED_PARTS:
        return HOSTED_TAG
    return "<media>" if kind in ("input_file", "input_audio", "computer_screenshot") else "<text>"


InputPart = Part | InputImagePart | ThinkingPart | HostedPart | MediaPart
AnyPart = Annotated[
    Annotated[Part, Tag("<text>")]
    | Annotated[InputImagePart, Tag("<input_image>")]
    | Annotated[ThinkingPart, Tag("<thinking>")]
    | Annotated[HostedPart, Tag(HOSTED_TAG)]
    | Annotated[MediaPart, Tag("<media>")],
    Discriminator(_part_tag),
]
Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[AnyPart], Field(fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]


def text_of(content: str | Sequence[Part]) -> str:
    """The content as one string."""
    return content if isinstance(content, str) else "\n".join(part.content for part in content)


def content_of(content: str | Sequence[InputPart], images: SentImages, path: str) -> str:
    """The content as one string, with marks for its images, which are added to `images`.

    Raises InvalidRequestError for an image that cannot be read.
    """
    if isinstance(content, str):
        return content
    return joined(
        part.content if isinstance(part, Part) else part.mark(images, f"{path}[{index}]")
        for index, part in enumerate(content)
        if isinstance(part, Part | InputImagePart)
    )


class Item(EchoedModel):
    """The fields of all items."""

    id: ItemId | None = no_effect("Id of the item.")
    status: str | None = no_effect("Status of the item.", max_length=64)


class MessageItem(Item):
    """A message."""

    type: Literal["message"] | None = Field(None, description="Optional.")
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = Field("", description="Required, except in the assistant's messages.")
    phase: Literal["commentary", "final_answer"] | None = hint(
        "The purpose of the assistant's message.", "The phase is not shown to the model."
    )

    @model_validator(mode="after")
    def _has_content(self) -> "MessageItem":
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", "content")
        return self


class ReasoningItem(Item):
    """Reasoning of the model, passed to a chat template that shows it."""

    type: Literal["reasoning"]
    summary: list[Part] | None = Field(
        None, description="Used if there is neither `content` nor text sealed by this server."
    )
    content: list[Part] | None = Field(None, description="The text of the reasoning.")
    encrypted_content: str | None = Field(None, description="The text, sealed by this server.")

    @property
    def text(self) -> str:
        """The best known text of the reasoning."""
        unsealed = unseal(self.encrypted_content, "reasoning") if self.encrypted_content else None
        return text_of(self.content or ()) or unsealed or text_of(self.summary or ())

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield from super().ignored(path)
        if self.encrypted_content and not self.text:
            yield Notice(f"{path}.encrypted_content", "It was not sealed by this server.")


class CalledItem(Item):
    """The fields of calls and their results."""

    call_id: str = Field(description="Id that a call and its result share.")
    caller: dict[str, Any] | None = no_effect("The caller.")


class CallItem(CalledItem):
    """A call."""

    name: str = Field(description="The tool that was called.")
    namespace: str | None = Field(None, description="The tool's namespace.")


class FunctionCallItem(CallItem):
    """A call of a function."""

    type: Literal["function_call"]
    arguments: str = Field(
        description="A JSON object, as text. The chat template gets the object, or the text if it is not a JSON object."
    )


class CustomCallItem(CallItem):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    input: str = Field(description="The tool's input.")


class CallOutputItem(CalledItem):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    output: Content = Field(description="The tool's output.")
    name: str | None = no_effect("The tool's name, which is known from the call.")
    namespace: str | None = no_effect("The tool's namespace, which is known from the call.")


class ReferenceItem(EchoedModel):
    """A reference to a stored item."""

    type: Literal["item_reference"] | None = Field(None, description="Optional.")
    id: ItemId = Field(description="Id of the item; an unknown id is an error.")


class AdditionalToolsItem(Item):
    """More tools, as if they were in `tools`."""

    type: Literal["additional_tools"]
    role: str | None = no_effect("Role of the item.")
    tools: list[AnyTool] = Field(max_length=MAX_TOOLS, fail_fast=True, description="The tools.")


class CompactionItem(Item):
    """The summary of a conversation, made by POST /v1/responses/compact."""

    type: Literal["compaction"]
    encrypted_content: str = Field(description="The summary, sealed by this server; anything else is an error.")

    @model_validator(mode="after")
    def _is_ours(self) -> "CompactionItem":
        if unseal(self.encrypted_content, "summary") is None:
            raise problem("invalid_value", "Invalid '{path}': it was not sealed by this server.", "encrypted_content")
        return self

    @property
    def summary(self) -> str:
        """The summary of the conversation."""
        text = unseal(self.encrypted_content, "summary")
        assert text is not None, "it was validated"
        return text


class HostedItem(EchoedModel):
    """A call of a tool that another server ran, or its result: ignored and reported."""

    type: Literal[
        "file_search_call", "web_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
        "computer_call_output", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
        "apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request",
        "mcp_approval_response", "mcp_call", "tool_search_call", "tool_search_output", "program", "program_output",
    ]  # fmt: skip
    id: ItemId | None = no_effect("Id of the item.")
    call_id: str | None = no_effect("Id that the call and its result share.")

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield Notice(path, f"Items of the type '{self.type}' belong to hosted tools, which this server does not have.")


def _item_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None:
        is_reference = isinstance(value, dict) and "role" not in value and "id" in value
        return "<item_reference>" if is_reference else "<message>"
    return "<any of hosted tools>" if isinstance(kind, str) and kind in _HOSTED else f"<{kind}>"


_HOSTED = frozenset(HostedItem.model_fields["type"].annotation.__args__)  # type: ignore[union-attr]

InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[CallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReferenceItem, Tag("<item_reference>")]
    | Annotated[AdditionalToolsItem, Tag("<additional_tools>")]
    | Annotated[CompactionItem, Tag("<compaction>")]
    | Annotated[HostedItem, Tag("<any of hosted tools>")],
    Discriminator(_item_tag),
]
Input = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[InputItem], Field(fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]


def seal(**content: str) -> str:
    """Encode content as opaque text that clients send back."""
    return base64.b64encode(json.dumps({"v": _SEAL_VERSION, **content}, separators=(",", ":")).encode()).decode()


def unseal(text: str, key: str) -> str | None:
    """The content of a sealed text under a key; None if it has none, or this server did not seal it."""
    try:
        content = parse_json(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, InvalidRequestError):
        return None
    if not isinstance(content, dict) or content.get("v") != _SEAL_VERSION:
        return None
    found = content.get(key)
    return found if isinstance(found, str) else None
