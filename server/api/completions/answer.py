"""POST /v1/completions."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from model_runner.contract import Breaker
from server.http.body import JSONRoute
from server.api.answers.answer import (
    Head,
    UsageReport,
    WholeChoice,
    collect,
    encode,
    make_head,
    make_usage,
    new_id,
    score_of,
    spell_breakers,
    start_run,
    unless_gone,
)
from server.generation.choice_text import OutputToken, Piece
from server.api.answers.logprobs import completion_logprobs, prompt_logprobs, trimmed
from server.api.completions.schema import CompletionRequest
from server.api.answers.objects import Completion, CompletionChoice
from server.generation.run import PromptRun, Run
from server.http.sse import event_stream
from server.http.openapi import GENERATION_ERRORS, streamed
from server.generation.planning.planner import NEGATIVE_PROMPT, Planner, Wanted
from server.http.responses import documented_errors, json_response
from server.http.services import Services, ServicesDep
from server.text.detokenizer import Detokenizer

DEFAULT_MAX_TOKENS = 16

router = APIRouter(route_class=JSONRoute)


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={200: streamed(Completion), **documented_errors(*GENERATION_ERRORS)},
    tags=["OpenAI"],
)
async def create_completion(body: CompletionRequest, request: Request, services: ServicesDep) -> Response:
    """Continue one or several prompts."""
    services.check_model(body.model)
    planner = services.planner()
    prompts = [await _tokens(services, planner, body, index) for index in range(len(body.prompts))]
    negative_prompt = await _negative_prompt(services, planner, body)
    wanted = _wanted(body, negative_prompt, await spell_breakers(services, body))
    plan = planner.plan(new_id("cmpl"), body, prompts, wanted)
    head = await make_head(services, plan)
    run = start_run(services, request, plan)
    answer = _CompletionAnswer(body, run, head, services)
    if body.stream:
        chunks = answer.chunks()
        return await event_stream(request, chunks, services.settings)
    choices = _best(await unless_gone(request, collect(run)), body.num_choices, body.num_answers)
    return json_response(await asyncio.to_thread(answer.whole, choices))  # logprobs of a long prompt take a while


async def _tokens(services: Services, planner: Planner, body: CompletionRequest, index: int) -> Sequence[int]:
    prompt = body.prompts[index]
    if isinstance(prompt, str):
        if body.truncate_prompt_tokens is None:
            planner.check_text(prompt, "prompt")
        return await encode(services, prompt, add_special_tokens=True)
    planner.check_tokens(prompt, "prompt" if body.prompt is prompt else f"prompt[{index}]")
    return prompt


async def _negative_prompt(services: Services, planner: Planner, body: CompletionRequest) -> Sequence[int] | None:
    text = body.guidance.negative_prompt if body.guidance else None
    if text is None:
        return None
    planner.check_text(text, NEGATIVE_PROMPT)
    return await encode(services, text, add_special_tokens=True)


def _wanted(body: CompletionRequest, negative_prompt: Sequence[int] | None, breakers: tuple[Breaker, ...]) -> Wanted:
    ranks = body.num_choices > body.num_answers
    counts = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return Wanted(
        prompt_param="prompt",
        max_tokens=body.max_tokens,
        max_tokens_param="max_tokens",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=0 if ranks and body.logprobs is None else body.logprobs,
        prompt_logprobs=max((count for count in counts if count is not None), default=None),
        num_choices=body.num_choices,
        breakers=breakers,
        negative_prompt=negative_prompt,
    )


def _best(choices: list[WholeChoice], generated: int, wanted: int) -> list[WholeChoice]:
    """Of so many choices generated for each prompt the wanted ones, those of the highest logprob per token first.

    The lower index comes first among equals. If all are wanted, they stay in their order, as in a stream.
    """
    if generated == wanted:
        return choices
    best: list[WholeChoice] = []
    for start in range(0, len(choices), generated):
        best += sorted(choices[start : start + generated], key=_mean_logprob, reverse=True)[:wanted]
    return best


def _mean_logprob(choice: WholeChoice) -> float:
    """Over all tokens, one that ended the choice included; 0 where there are none."""
    logprobs = [token.logprobs.logprob for token in choice.tokens if token.logprobs is not None]
    return sum(logprobs) / max(len(logprobs), 1)


class _CompletionAnswer:
    """One answer, whole or in chunks. With echo, every choice begins with the prompt, as if it had been generated."""

    def __init__(self, body: CompletionRequest, run: Run, head: Head, services: Services) -> None:
        self.run = run
        self._body = body
        self._head = head
        self._tokenizer = services.tokenizer
        self._echoes = [self._echo_text(prompt) for prompt in run.prompts]

    def whole(self, choices: list[WholeChoice]) -> Completion:
        return Completion(
            **self._head,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=make_usage(self.run),
        )

    def _choice(self, index: int, choice: WholeChoice) -> CompletionChoice:
        prompt = self._prompt_of(index)
        piece = Piece(choice.text, tuple(choice.tokens), choice.finish_reason, choice.stop_reason, choice.beam)
        extra = self._prompt_extra(prompt)
        if self._body.prompt_logprobs is not None:
            reported = prompt.prompt_logprobs or ()
            extra["prompt_logprobs"] = prompt_logprobs(self._tokenizer, reported, self._body.prompt_logprobs)
        return self._entry(index, piece, self._echo_tokens(prompt), self._echoes[prompt.index], extra)

    async def chunks(self) -> AsyncGenerator[Completion]:
        """The echo of each choice, if it was asked for, and its text with its end; then the usage."""
        usage = UsageReport(self.run, self._body.stream_options)
        begun: set[int] = set()
        async with aclosing(self.run.pieces()) as pieces:
            async for index, piece in pieces:
                for entry in self._entries(index, piece, begins=index not in begun):
                    yield self._chunk(usage, entry)
                begun.add(index)
        if usage.at_end:
            yield Completion(**self._head, choices=[], usage=make_usage(self.run))

    def _entries(self, index: int, piece: Piece, *, begins: bool) -> Iterator[CompletionChoice]:
        """A piece, and before the first one the echo. What belongs to the prompt comes with whichever is first."""
        prompt = self._prompt_of(index)
        extra = self._prompt_extra(prompt) if begins else {}
        if begins and self._body.echo:
            yield self._entry(index, Piece(""), self._echo_tokens(prompt), self._echoes[prompt.index], extra)
            extra = {}
        yield self._entry(index, piece, [], "", extra)

    def _chunk(self, usage: UsageReport, entry: CompletionChoice) -> Completion:
        return Completion(**self._head, choices=[entry], **usage.in_chunk())

    def _entry(
        self, index: int, piece: Piece, echo_tokens: Sequence[OutputToken], echo_text: str, extra: dict[str, Any]
    ) -> CompletionChoice:
        """The echo, of which either part may be empty, and a piece of what follows it."""
        prompt = self._prompt_of(index)
        logprobs = None
        if self._body.logprobs is not None:
            shift = len(self._echoes[prompt.index])
            shown = [*echo_tokens, *(replace(token, offset=token.offset + shift) for token in piece.tokens)]
            logprobs = completion_logprobs(self._tokenizer, shown)
        if self._body.return_token_ids:
            extra = {**extra, "token_ids": [token.id for token in piece.tokens]}
        reason: Any = piece.finish_reason
        return CompletionChoice(
            index=index,
            text=echo_text + piece.text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=piece.stop_reason,
            seed=self.run.plan.seed_of(prompt.index),
            **score_of(piece.beam),
            **extra,
        )

    def _prompt_of(self, index: int) -> PromptRun:
        return self.run.prompts[index // self._body.num_answers]

    def _prompt_extra(self, prompt: PromptRun) -> dict[str, Any]:
        return {"prompt_token_ids": list(prompt.request.prompt)} if self._body.return_token_ids else {}

    def _echo_text(self, prompt: PromptRun) -> str:
        """The prompt as the client wrote it; decoded if it came as tokens or was truncated. Empty without echo."""
        if not self._body.echo:
            return ""
        given = self._body.prompts[prompt.index]
        if isinstance(given, str) and self._body.truncate_prompt_tokens is None:
            return given
        skip = self.run.plan.options.skip_special_tokens
        return self._tokenizer.decode(prompt.request.prompt, skip_special_tokens=skip)

    def _echo_tokens(self, prompt: PromptRun) -> list[OutputToken]:
        """The prompt's tokens for the logprobs of an echo; the first has none."""
        if not self._body.echo or self._body.logprobs is None:
            return []
        reported = [trimmed(token, self._body.logprobs) for token in prompt.prompt_logprobs or ()]
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=self.run.plan.options.skip_special_tokens)
        tokens: list[OutputToken] = []
        offset, end = 0, len(self._echoes[prompt.index])
        for token, logprobs in zip(prompt.request.prompt, [None, *reported], strict=True):
            tokens.append(OutputToken(token, min(offset, end), logprobs))
            offset += len(detokenizer.push(token))
        return tokens
