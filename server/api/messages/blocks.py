"""Messages in Anthropic's format: texts or lists of blocks. Unknown fields are ignored and reported."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.images import from_base64
from server.api.fields.messages import HOSTED_TAG, HostedPart, part_tag
from server.api.fields.rules import SUPPORTED_VALUES_ONLY, EchoedModel, hint, problem, shape, tag_by_type
from server.api.fields.tools import cache_control
from server.errors import InvalidRequestError
from server.generation.notices import Notice
from server.generation.sent_images import SentImage, SentImages
from server.text.image_marks import joined

_OURS = "samewise:"


class CacheControl(EchoedModel):
    """A mark up to which the prompt should be cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(EchoedModel):
    """A text. `input_text` and `output_text` are OpenAI's names."""

    type: Literal["text", "input_text", "output_text"]
    text: str = Field(description="Texts of one message are joined by line breaks.")
    cache_control: CacheControl | None = cache_control()
    citations: list[Any] | None = hint("Sources of the text.", "Citations are not used.")


class Base64Source(EchoedModel):
    """An image in base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] = Field(
        description="The file's type. It is not compared with the file."
    )
    data: str = Field(description="The file in base64.")


class UrlSource(EchoedModel):
    """An image on another server."""

    type: Literal["url"]
    url: str = Field(description="An https URL on one of the server's `image_hosts`; others are refused.")


class FileSource(EchoedModel):
    """An uploaded image."""

    type: Literal["file"]
    file_id: str = Field(description="Id of the file.")


ImageSource = Annotated[
    Annotated[Base64Source, Tag("<base64>")]
    | Annotated[UrlSource, Tag("<url>")]
    | Annotated[FileSource, Tag("<file>")],
    Discriminator(tag_by_type("base64")),
]


class Transformations(EchoedModel):
    """Changes that are allowed before the model sees an image."""

    oversized_image: Annotated[Literal["downsize"] | None, SUPPORTED_VALUES_ONLY] = Field(
        None, description="Images are scaled to the model's resolution."
    )


class ImageBlock(EchoedModel):
    """An image."""

    type: Literal["image"]
    source: ImageSource
    transformations: Transformations | None = Field(None, description="What may be done with the image.")
    cache_control: CacheControl | None = cache_control()

    def mark(self, images: SentImages, path: str) -> str:
        """Add the image to the others; returns its mark. Raises InvalidRequestError with Anthropic's words."""
        field = f"{path.replace('[', '.').replace(']', '')}.image.source"
        if isinstance(self.source, UrlSource):
            return images.add(SentImage("image", b"", path, f"{field}.url", url=self.source.url))
        if isinstance(self.source, FileSource):
            return images.add(SentImage("image", b"", path, f"{field}.file_id", self.source.file_id))
        data = from_base64(self.source.data)
        if data is None:
            message = f"{field}.base64.data: The image is not valid base64."
            raise InvalidRequestError(message, param=f"{path}.source.data", code="invalid_base64")
        return images.add(SentImage("image", data, path, field))


class ThinkingBlock(EchoedModel):
    """The assistant's thinking; ignored and reported if the chat template does not show it."""

    type: Literal["thinking"]
    thinking: str = Field(description="The text; empty if it was not shown.")
    signature: str | None = Field(
        None, description="The signature, unchanged; it contains thinking that was not shown."
    )

    @property
    def thought(self) -> str:
        """The text, whether it was shown or is in the signature."""
        return self.thinking or hidden_in(self.signature or "") or ""

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield from super().ignored(path)
        if self.signature and not self.thinking and hidden_in(self.signature) is None:
            yield Notice(f"{path}.signature", "The signature is another server's, so the thinking is unknown.")


class ToolUseBlock(EchoedModel):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str = Field(description="Id of the call, which the block with its result names.")
    name: str = Field(description="The tool that was called.")
    input: dict[str, Any] | str = Field(description="The arguments; as text, if they are not a JSON object.")
    caller: dict[str, Any] | None = hint("The caller.", "Only the model calls tools.", off=[{"type": "direct"}])
    cache_control: CacheControl | None = cache_control()


class ToolReferenceBlock(EchoedModel):
    """A tool with `defer_loading` that was found, and may be called from now on."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl | None = cache_control()


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")],
    Discriminator(tag_by_type("text")),
]


class ToolResultBlock(EchoedModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(description="Id of the call.")
    content: (
        Annotated[
            Annotated[str, Tag("<string>")] | Annotated[list[ResultBlock], Tag("<array>")],
            Discriminator(shape),
        ]
        | None
    ) = Field(None, description="Texts are joined by line breaks.")
    is_error: bool | None = Field(None, description="Put `Error:` before the content, for the model.")
    cache_control: CacheControl | None = cache_control()

    def text(self, known: Collection[str], images: SentImages, path: str) -> str:
        """The result as text for the model, with marks for its images, which are added to `images`.

        References to tools that are not in `known` are omitted. Raises InvalidRequestError.
        """
        content = self.content or ""
        text = content if isinstance(content, str) else joined(_shown(content, known, images, f"{path}.content"))
        return f"Error: {text}" if self.is_error else text

    @property
    def found(self) -> Sequence[tuple[int, str]]:
        """Names of the referenced tools, and the indices of their blocks."""
        content = () if self.content is None or isinstance(self.content, str) else self.content
        return [
            (place, block.tool_name) for place, block in enumerate(content) if isinstance(block, ToolReferenceBlock)
        ]


def _shown(
    content: Sequence[TextBlock | ImageBlock | ToolReferenceBlock],
    known: Collection[str],
    images: SentImages,
    path: str,
) -> Iterator[str]:
    for place, block in enumerate(content):
        if isinstance(block, TextBlock):
            yield block.text
        elif isinstance(block, ImageBlock):
            yield block.mark(images, f"{path}[{place}]")
        elif block.tool_name in known:
            yield f"The tool {block.tool_name} can be called now."


Block = TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | HostedPart
_TaggedBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[TextBlock, Tag("<input_text>")]
    | Annotated[TextBlock, Tag("<output_text>")]
    | Annotated[HostedPart, Tag(HOSTED_TAG)],
    Discriminator(part_tag),
]
SystemText = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[TextBlock], Field(fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]
_KINDS = {
    "user": (TextBlock, ImageBlock, ToolResultBlock, HostedPart),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock, HostedPart),
    "system": (TextBlock,),
}
"""The blocks that are allowed in messages of each role."""


class InputMessage(EchoedModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"] = Field(
        description="`system` messages may be anywhere in the conversation."
    )
    content: (
        Annotated[
            Annotated[str, Tag("<string>")] | Annotated[list[_TaggedBlock], Field(fail_fast=True), Tag("<array>")],
            Discriminator(shape),
        ]
        | None
    ) = Field(
        None,
        description="A text, or blocks. Results of calls come before texts in the prompt. Required, except in the "
        "assistant's messages.",
    )

    @model_validator(mode="after")
    def _fit_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise problem("missing_required_parameter", "Missing required parameter: '{path}'.", "content")
        for index, block in enumerate(self.blocks):
            if not isinstance(block, _KINDS[self.role]):
                message = f"Invalid '{{path}}': messages of the role '{self.role}' cannot have '{block.type}'."
                raise problem("invalid_value", message, f"content[{index}].type")
        return self

    @property
    def blocks(self) -> Sequence[Block]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return (TextBlock(type="text", text=self.content),)
        return self.content or ()

    @property
    def text(self) -> str:
        """All text of the message."""
        return text_of(self.content)

    def shown(self, images: SentImages, path: str) -> str:
        """The text with marks for the message's images, which are added to `images`. Raises InvalidRequestError."""
        return joined(
            block.text if isinstance(block, TextBlock) else block.mark(images, f"{path}.content[{place}]")
            for place, block in enumerate(self.blocks)
            if isinstance(block, TextBlock | ImageBlock)
        )


def text_of(content: str | Sequence[Block] | None) -> str:
    """The texts of the content."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def signature_of(hidden: str = "") -> str:
    """The signature of thinking, which contains the part that is not shown, `hidden`.

    The client sends it back, so that the chat template can show it. Nothing is verified, because the text belongs to
    the client. A signature is never empty, because some clients drop thinking without one.
    """
    return _OURS + urlsafe_b64encode(hidden.encode()).decode()


def hidden_in(signature: str) -> str | None:
    """The text in a signature; None if another server made it."""
    if not signature.startswith(_OURS):
        return None
    try:
        return urlsafe_b64decode(signature.removeprefix(_OURS)).decode()
    except ValueError:
        return None
