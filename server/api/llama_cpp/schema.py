"""The requests of POST /completion and POST /infill."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from server.api.fields.decoding import TokenId
from server.api.fields.rules import SUPPORTED_ONLY, RequestModel, refused
from server.api.llama_cpp.fields import LlamaFields
from server.generation.request import ContextFile, MixedPrompt, TextPrompt, TokenPrompt

MAX_PROMPTS = 1024
MAX_FILES = 256

Piece = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[TokenId, Tag("<token>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<token>"),
]
Pieces = Annotated[list[Piece], Field(min_length=1, fail_fast=True)]


class PromptObject(RequestModel):
    """A prompt with a name."""

    prompt_string: str
    multimodal_data: Annotated[list[Any] | None, Field(max_length=0), SUPPORTED_ONLY] = refused("Images and audio.")


def _shape(value: object) -> str | None:
    """Which of the shapes one prompt has."""
    if isinstance(value, str):
        return "<text>"
    return "<object>" if isinstance(value, dict) else "<pieces>" if isinstance(value, list) else None


def _shape_of_all(value: object) -> str | None:
    """Which of the shapes the prompt has: an array with a number is one prompt, any other holds several."""
    if isinstance(value, list) and value and not any(isinstance(item, int | float) for item in value):
        return "<batch>"
    return _shape(value)


Prompt = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Pieces, Tag("<pieces>")] | Annotated[PromptObject, Tag("<object>")],
    Discriminator(_shape),
]
Prompts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Pieces, Tag("<pieces>")]
    | Annotated[PromptObject, Tag("<object>")]
    | Annotated[list[Prompt], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("<batch>")],
    Discriminator(_shape_of_all),
]


class LlamaCompletionRequest(LlamaFields):
    """llama.cpp's fields."""

    prompt: Prompts = Field(
        description="A text, or token ids and texts that are joined; or an array of such prompts, which is answered "
        "by an array."
    )

    @property
    def prompts(self) -> Sequence[TextPrompt | TokenPrompt | MixedPrompt]:
        """All prompts, in whichever shape they came."""
        if isinstance(self.prompt, list) and _shape_of_all(self.prompt) == "<batch>":
            return [_prompt(prompt, f"prompt[{index}]") for index, prompt in enumerate(self.prompt)]
        return [_prompt(self.prompt, "prompt")]


def _prompt(prompt: Any, path: str) -> TextPrompt | TokenPrompt | MixedPrompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt, path)
    if isinstance(prompt, PromptObject):
        return TextPrompt(prompt.prompt_string, f"{path}.prompt_string")
    if all(isinstance(piece, int) for piece in prompt):
        return TokenPrompt(tuple(prompt), path)
    return MixedPrompt(tuple(prompt), path)


class ExtraFile(RequestModel):
    """A file that is shown before the one with the gap."""

    text: str = Field(description="Its content.")
    filename: str | None = Field(None, description="Its name, for models that know a pattern with names.")


class InfillRequest(LlamaFields):
    """llama.cpp's fields."""

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after the gap.")
    input_extra: list[ExtraFile] | None = Field(
        None, max_length=MAX_FILES, fail_fast=True, description="Other files, shown before that with the gap."
    )
    prompt: str | None = Field(None, description="More text before the gap, behind `input_prefix`.")

    @property
    def files(self) -> Sequence[ContextFile]:
        """The other files."""
        return [ContextFile(file.filename, file.text) for file in self.input_extra or ()]
