"""Messages in Anthropic's API: texts, or lists of blocks. Unknown fields in them are ignored and reported."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.rules import EchoedModel, hint, no_effect, problem, shape, tag_by_type
from server.generation.notices import Notice

_OURS = "samewise:"


class CacheControl(EchoedModel):
    """A mark after which the prompt is to be cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def cache_control() -> Any:
    """The default of the field of this name, which many blocks have."""
    return no_effect("Every prefix is cached, for as long as there is room.")


class TextBlock(EchoedModel):
    """A text."""

    type: Literal["text"]
    text: str = Field(description="Texts of one message are joined by line breaks.")
    cache_control: CacheControl | None = cache_control()
    citations: list[Any] | None = hint("Sources of the text.", "Citations are not read.")


class ThinkingBlock(EchoedModel):
    """What the assistant thought. Left out and reported if the chat template does not show it."""

    type: Literal["thinking"]
    thinking: str = Field(description="The text; empty where it was not shown.")
    signature: str | None = Field(None, description="As it came: it holds what was not shown.")

    @property
    def thought(self) -> str:
        """The text, shown or not."""
        return self.thinking or hidden_in(self.signature or "") or ""

    def left_out(self, path: str = "") -> Iterator[Notice]:
        """See RequestModel."""
        yield from super().left_out(path)
        if self.signature and not self.thinking and hidden_in(self.signature) is None:
            yield Notice(f"{path}.signature", "The thinking that it stands for is not known here.")


class RedactedThinkingBlock(EchoedModel):
    """Thinking that only another server can read."""

    type: Literal["redacted_thinking"]
    data: str = hint("The thinking, encrypted.", "It cannot be read here.")


class ToolUseBlock(EchoedModel):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str = Field(description="What the block with its result names.")
    name: str = Field(description="The tool.")
    input: dict[str, Any] | str = Field(description="The arguments; as text, where they are no JSON object.")
    caller: dict[str, Any] | None = hint("Who called.", "Only the model calls tools.", off=[{"type": "direct"}])
    cache_control: CacheControl | None = cache_control()


class ToolReferenceBlock(EchoedModel):
    """A tool that was found, and may be called from now on: one with `defer_loading`."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl | None = cache_control()


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolReferenceBlock, Tag("<tool_reference>")],
    Discriminator(tag_by_type("text")),
]


class ToolResultBlock(EchoedModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(description="The call.")
    content: (
        Annotated[
            Annotated[str, Tag("<string>")] | Annotated[list[ResultBlock], Tag("<array>")],
            Discriminator(shape),
        ]
        | None
    ) = Field(None, description="Texts are joined by line breaks.")
    is_error: bool | None = Field(None, description="The model is told so: `Error:` is put before the content.")
    cache_control: CacheControl | None = cache_control()

    def text(self, known: Collection[str]) -> str:
        """What the model is shown, where there are these tools."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(_shown(content, known))
        return f"Error: {text}" if self.is_error else text

    @property
    def found(self) -> Sequence[tuple[int, str]]:
        """The tools that it names, and the places of their blocks."""
        content = () if self.content is None or isinstance(self.content, str) else self.content
        return [
            (place, block.tool_name) for place, block in enumerate(content) if isinstance(block, ToolReferenceBlock)
        ]


def _shown(content: Sequence[TextBlock | ToolReferenceBlock], known: Collection[str]) -> Iterator[str]:
    for block in content:
        if isinstance(block, TextBlock):
            yield block.text
        elif block.tool_name in known:
            yield f"The tool {block.tool_name} can be called now."


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
_TaggedBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(tag_by_type("text")),
]
SystemText = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[TextBlock], Field(fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]
_KINDS = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
"""The blocks that messages of each role may have."""


class InputMessage(EchoedModel):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"] = Field(description="`system` may stand anywhere.")
    content: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[list[_TaggedBlock], Field(fail_fast=True), Tag("<array>")],
        Discriminator(shape),
    ] = Field(description="A text, or blocks; results of calls are read before the texts beside them.")

    @model_validator(mode="after")
    def _fit_role(self) -> Self:
        for index, block in enumerate(self.blocks):
            if not isinstance(block, _KINDS[self.role]):
                message = f"Invalid '{{path}}': messages of the role '{self.role}' have no '{block.type}'."
                raise problem("invalid_value", message, f"content[{index}].type")
        return self

    @property
    def blocks(self) -> Sequence[Block]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return (TextBlock(type="text", text=self.content),)
        return self.content

    @property
    def text(self) -> str:
        """All of its text."""
        return text_of(self.content)


def text_of(content: str | Sequence[Block]) -> str:
    """The texts of the content."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def signature_of(hidden: str = "") -> str:
    """The signature of thinking of which `hidden` is not shown.

    It holds that text, so that the client sends it back and the chat template can show it. Nothing is verified: the
    text is the client's own. It is never empty, because some clients drop thinking without a signature.
    """
    return _OURS + urlsafe_b64encode(hidden.encode()).decode()


def hidden_in(signature: str) -> str | None:
    """The text that a signature holds; None for another server's."""
    if not signature.startswith(_OURS):
        return None
    try:
        return urlsafe_b64decode(signature.removeprefix(_OURS)).decode()
    except ValueError:
        return None
