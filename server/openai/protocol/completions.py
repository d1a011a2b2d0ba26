"""The request of POST /v1/completions."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from server.openai.protocol.common import SamplingFields, TokenId
from server.openai.protocol.rules import SUPPORTED_ONLY, refused

MAX_PROMPTS = 1024

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


def prompt_shape(value: object) -> str | None:
    """Which of the four shapes the prompt has, by its first item."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return "<texts>" if isinstance(first, str) else "<batch>" if isinstance(first, list) else "<tokens>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<batch>")],
    Discriminator(prompt_shape),
]


class CompletionRequest(SamplingFields):
    """OpenAI's fields with OpenAI's limits, and the extensions under vLLM's names."""

    prompt: Prompt = Field(description="One or several, as text or as token ids.")
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="16 by default.")
    echo: bool | None = Field(None, description="Show the prompt before the completion, also in the logprobs.")
    logprobs: int | None = Field(None, ge=0, le=5, description="Report each token and so many alternatives.")

    best_of: Annotated[Literal[1] | None, SUPPORTED_ONLY] = refused("Choosing the best of several outputs.")
    suffix: Annotated[Literal[""] | None, SUPPORTED_ONLY] = refused("Text after the completion.")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts, whichever of the four shapes they came in."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
