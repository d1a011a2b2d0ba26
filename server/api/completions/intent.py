"""What the body of a completion asks for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from server.api.completions.schema import DEFAULT_MAX_TOKENS, CompletionRequest
from server.api.fields.openai import shared_fields
from server.generation.notices import Notice
from server.generation.planning.plan import Plan
from server.generation.request import FillIn, GenerationRequest, TextPrompt, TokenPrompt
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """What the answer has to know of the body."""

    num_answers: int
    """For each prompt: the best ones."""
    logprobs: int | None
    prompt_logprobs: int | None
    return_token_ids: bool
    return_token_sources: bool
    include_usage: bool
    continuous_usage: bool
    echoes: Sequence[str] | None
    """With `echo`, the text of each prompt."""
    tokens_as_ids: bool


def completion_intent(body: CompletionRequest) -> GenerationRequest:
    """The body's fields as a request."""
    ranks = body.num_choices > body.num_answers
    of_prompt = [count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None]
    paths = {"echoes": "echo", "prompt_logprobs": "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"}
    shared = shared_fields(body, {**paths, "num_choices": "best_of"} if ranks else paths, body.constraint)
    notices = (*shared["notices"], *_not_added(body))
    return GenerationRequest(
        **{**shared, "prompt_logprobs": max(of_prompt, default=None), "notices": notices},
        id_prefix="cmpl-",
        prompts=tuple(_prompt(body, index, prompt) for index, prompt in enumerate(body.prompts)),
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_choices=body.num_choices,
        echoes=bool(body.echo),
        num_repeats=body.num_answers,
        logprobs=0 if ranks and body.logprobs is None else body.logprobs,
    )


def _not_added(body: CompletionRequest) -> Iterator[Notice]:
    if body.add_special_tokens and not all(isinstance(prompt, str) for prompt in body.prompts):
        yield Notice("add_special_tokens", "A prompt of tokens is taken as it is.")


def completion_options(body: CompletionRequest, plan: Plan, tokenizer: Tokenizer) -> CompletionOptions:
    """What the answer has to know of the body."""
    return CompletionOptions(
        num_answers=body.num_answers,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        return_token_sources=bool(body.return_token_sources),
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        echoes=_echoes(body, plan, tokenizer) if body.echo else None,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )


def _echoes(body: CompletionRequest, plan: Plan, tokenizer: Tokenizer) -> Sequence[str]:
    """The prompts as the client wrote them; decoded if they came as tokens or were truncated."""
    skip = plan.options.skip_special_tokens
    return [
        written
        if isinstance(written, str) and body.truncate_prompt_tokens is None
        else tokenizer.decode(request.prompt, skip_special_tokens=skip)
        for written, request in zip(body.prompts, plan.requests, strict=True)
    ]


def _prompt(body: CompletionRequest, index: int, prompt: str | list[int]) -> TextPrompt | TokenPrompt | FillIn:
    path = "prompt" if body.prompt is prompt else f"prompt[{index}]"
    if body.suffix:
        return FillIn((prompt,) if isinstance(prompt, str) else prompt, body.suffix, path, "suffix")
    if isinstance(prompt, str):
        return TextPrompt(prompt, path, adds_special=body.add_special_tokens is not False)
    return TokenPrompt(tuple(prompt), path)
