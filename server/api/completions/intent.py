"""What the body of a completion asks for."""

from collections.abc import Sequence
from dataclasses import dataclass

from server.api.completions.schema import DEFAULT_MAX_TOKENS, CompletionRequest
from server.api.fields.openai import shared_fields
from server.generation.request import GenerationRequest, TextPrompt, TokenPrompt


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """What the answer has to know of the body."""

    num_answers: int
    """For each prompt: the best ones."""
    logprobs: int | None
    prompt_logprobs: int | None
    return_token_ids: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    echoed: Sequence[str | None] = ()
    """With `echo`, each prompt as the client wrote it; None where it is what its tokens say."""


def completion_intent(body: CompletionRequest) -> GenerationRequest:
    """The body's fields as a request."""
    ranks = body.num_choices > body.num_answers
    of_prompt = [count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None]
    shared = shared_fields(body, {"num_choices": "best_of"} if ranks else {})
    return GenerationRequest(
        **{**shared, "prompt_logprobs": max(of_prompt, default=None)},
        id_prefix="cmpl",
        prompts=tuple(_prompt(body, index, prompt) for index, prompt in enumerate(body.prompts)),
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_choices=body.num_choices,
        logprobs=0 if ranks and body.logprobs is None else body.logprobs,
    )


def completion_options(body: CompletionRequest) -> CompletionOptions:
    """What the answer has to know of the body."""
    as_written = body.truncate_prompt_tokens is None
    echoed = [prompt if isinstance(prompt, str) and as_written else None for prompt in body.prompts]
    return CompletionOptions(
        num_answers=body.num_answers,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        echo=bool(body.echo),
        echoed=tuple(echoed) if body.echo else (),
    )


def _prompt(body: CompletionRequest, index: int, prompt: str | list[int]) -> TextPrompt | TokenPrompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    return TokenPrompt(tuple(prompt), "prompt" if body.prompt is prompt else f"prompt[{index}]")
