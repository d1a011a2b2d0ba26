"""Request schema for POST /v1/completions, and its conversion to a GenerationRequest."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Self, cast

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.decoding import NumAlternatives, TokenId
from server.api.fields.foreign import NPredict, NProbs, NumPredict
from server.api.fields.openai import SamplingFields, shared_fields
from server.api.fields.rules import problem, related, same_as
from server.generation.notices import Notice
from server.generation.request import FillIn, GenerationRequest, TextPrompt, TokenPrompt

MAX_PROMPTS = 1024
MAX_BEST_OF = 20
DEFAULT_MAX_TOKENS = 16

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


def prompt_shape(value: object) -> str | None:
    """The tag of the prompt's shape, of which there are four, by its first item."""
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
    """Request schema for POST /v1/completions: OpenAI's fields and limits, and extensions under vLLM's names."""

    prompt: Prompt = Field(description="One or several prompts, as text or as token ids.")
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description=f"The most output tokens; {DEFAULT_MAX_TOKENS} by default. Never more than the context has left.",
    )
    n_predict: NPredict = same_as("max_tokens", "llama.cpp's name; -1 is no limit.")
    num_predict: NumPredict = same_as("max_tokens", "Ollama's name; 0 or less is no limit.")
    echo: bool | None = Field(None, description="Return the prompt before the completion, also in the logprobs.")
    logprobs: NumAlternatives | None = Field(
        None,
        description="Report the logprobs of each token and of this many alternatives, at most the setting "
        "`max_logprobs`.",
    )
    n_probs: NProbs = same_as("logprobs", "llama.cpp's name; 0 reports nothing.")

    best_of: int | None = Field(
        None, ge=1, le=MAX_BEST_OF,
        description="Generate this many choices for each prompt, at least `n`, and return the `n` with the highest "
        "mean logprob per token, best first. All of them count as usage. Not with `stream` if above `n`.",
        json_schema_extra=related(off=[1]),
    )  # fmt: skip
    suffix: str | None = Field(
        None,
        description="The text after the completion, which fills the gap between `prompt` and `suffix`. Needs a model "
        "with fill-in-the-middle tokens.",
        json_schema_extra=related(excludes=["echo", "truncate_prompt_tokens"]),
    )

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is not None and self.beams is None and self.best_of < self.num_answers:
            message = f"Invalid '{{path}}': Expected a value >= 'n', which is {self.n}, but got {self.best_of} instead."
            raise problem("integer_below_min_value", message, "best_of")
        if self.stream and self.num_choices > self.num_answers:
            message = "Setting 'best_of' above 'n' and 'stream' at the same time is not supported."
            raise problem("invalid_parameter_combination", message, "best_of")
        return self

    @property
    def num_choices(self) -> int:
        """Choices to generate for each prompt; the best of them are returned."""
        return self.num_answers if self.best_of is None or self.beams is not None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report for each token; None: no log-probabilities are reported."""
        count: int | None = self.named_value("logprobs")[1]
        return count

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """All prompts, in any of the four shapes."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(Sequence[str | list[int]], self.prompt)


def completion_intent(body: CompletionRequest) -> GenerationRequest:
    """Convert a body."""
    ranks = body.num_choices > body.num_answers
    echoed = body.num_logprobs if body.echo else None
    of_prompt = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    logprobs, (max_tokens_path, max_tokens) = body.named_value("logprobs")[0], body.named_value("max_tokens")
    paths = {
        "echoes": "echo",
        "max_tokens": max_tokens_path,
        "logprobs": logprobs,
        "prompt_logprobs": logprobs if body.prompt_logprobs is None else "prompt_logprobs",
    }
    shared = shared_fields(body, {**paths, "num_choices": "best_of"} if ranks else paths, body.constraint)
    notices = (*shared["notices"], *_not_added(body))
    return GenerationRequest(
        **{**shared, "prompt_logprobs": max(of_prompt, default=None), "notices": notices},
        id_prefix="cmpl-",
        prompts=tuple(_prompt(body, index, prompt) for index, prompt in enumerate(body.prompts)),
        max_tokens=max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_choices=body.num_choices,
        echoes=bool(body.echo),
        num_repeats=body.num_answers,
        logprobs=0 if ranks and body.num_logprobs is None else body.num_logprobs,
    )


def _not_added(body: CompletionRequest) -> Iterator[Notice]:
    if body.add_special_tokens and not all(isinstance(prompt, str) for prompt in body.prompts):
        yield Notice("add_special_tokens", "A prompt of token ids is used unchanged.")


def _prompt(body: CompletionRequest, index: int, prompt: str | list[int]) -> TextPrompt | TokenPrompt | FillIn:
    path = "prompt" if body.prompt is prompt else f"prompt[{index}]"
    if body.suffix:
        return FillIn((prompt,) if isinstance(prompt, str) else prompt, body.suffix, path, "suffix")
    if isinstance(prompt, str):
        return TextPrompt(prompt, path, adds_special=body.add_special_tokens is not False)
    return TokenPrompt(tuple(prompt), path)
