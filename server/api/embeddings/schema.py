"""The request of POST /v1/embeddings, and its answer."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self, cast

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.completions.schema import TokenIds
from server.api.fields.messages import ConversationFields
from server.api.fields.pooling import PoolingFields
from server.api.fields.rules import problem, related, shape
from server.api.openai.numbers import PromptUsage
from server.api.openai.objects import WARNINGS, ReportedNotice, ResponseModel

MAX_INPUTS = 2048


def _input_shape(value: object) -> str | None:
    """Whether an array holds inputs or is one, by its first item."""
    if isinstance(value, list) and value and not isinstance(value[0], str | list):
        return "<tokens>"
    return shape(value)


Text = Annotated[str, Field(min_length=1)]
OneInput = Annotated[Annotated[Text, Tag("<string>")] | Annotated[TokenIds, Tag("<array>")], Discriminator(shape)]
Input = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[list[OneInput], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("<array>")],
    Discriminator(_input_shape),
]


class EmbeddingRequest(ConversationFields, PoolingFields):
    """OpenAI's fields, and extensions under the names of vLLM and sentence-transformers."""

    input: Input | None = Field(
        None, description="One text or several, each as text or as token ids; either this or `messages` is required.",
        json_schema_extra=related(excludes=["messages"]),
    )  # fmt: skip
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="`float` by default; `base64`: of the numbers as float32, little-endian."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Length of the vectors, for models that were trained to be shortened (Matryoshka)."
    )
    use_activation: bool | None = Field(
        None, description="Whether vectors have the length 1; by default as the model's configuration says."
    )
    prompt_name: str | None = Field(
        None,
        description="Which of the model's prompts, such as `query` or `document`, goes before the texts; by default "
        "the one that its configuration names.",
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Keep only so many tokens at the end of each text; -1: what fits."
    )

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if self.input is None and self.messages is None:
            raise problem("missing_required_parameter", "Missing required parameter: 'input'.", "input")
        return self

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            message = "Invalid '{path}': Expected -1 or a value >= 1, but got 0 instead."
            raise problem("integer_below_min_value", message, "truncate_prompt_tokens")
        return self

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """All texts, whichever shape they came in."""
        if isinstance(self.input, str) or (self.input and isinstance(self.input[0], int)):
            return [self.input]
        return cast(Sequence[str | list[int]], self.input or ())


class Embedding(ResponseModel):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="Which of the inputs.")
    embedding: list[float] | str = Field(description="The vector; base64 of it, if asked for.")


class EmbeddingList(ResponseModel):
    """Answer of POST /v1/embeddings."""

    object: Literal["list"] = "list"
    model: str = Field(description="As the request named it.")
    data: list[Embedding] = Field(description="In the order of the inputs.")
    usage: PromptUsage
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)
