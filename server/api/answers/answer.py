"""What chat completions and completions do alike: run a plan, head the answer, count the usage."""

import asyncio
import time
import uuid
from collections.abc import Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict, TypeVar

from fastapi import Request

from model_runner.contract import Breaker
from scheduler.interface import BeamScore
from server.http.disconnect import wait_unless_gone
from server.http.middleware import record_of
from server.generation.choice_text import OutputToken, Piece
from server.telemetry.request_meter import Meter
from server.api.fields.sampling import SamplingFields, StreamOptions
from server.api.answers.objects import CompletionTokensDetails, PromptTokensDetails, Usage
from server.generation.run import Run
from server.generation.planning.planner import Plan
from server.http.services import Services

_T = TypeVar("_T")
ENCODE_IN_THREAD = 1 << 14
"""Characters from which a text is encoded in a thread, so that the others' streams do not wait."""


class Head(TypedDict):
    """Properties that are the same in an answer and in all of its chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int
    verification: NotRequired[Literal["rejection", "typical"]]


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def make_head(services: Services, plan: Plan) -> Head:
    """The head of a new answer."""
    head = Head(
        id=plan.id,
        created=int(time.time()),
        model=services.model.name,
        system_fingerprint=await services.fingerprint.of(services.info()),
        seed=plan.seed,
    )
    if plan.verification != "match":
        head["verification"] = plan.verification
    return head


def start_run(services: Services, request: Request, plan: Plan) -> Run:
    """The plan, ready to run, with its meter running."""
    meter = Meter(services.metrics, record_of(request))
    meter.start(plan, services.tokenizer, keep_text=services.settings.log_prompts)
    return Run(services.engine, services.tokenizer, plan, meter, timeout_s=services.settings.request_timeout_s)


async def encode(services: Services, text: str, *, add_special_tokens: bool) -> list[int]:
    """The text's tokens; neither a long text nor many short ones keep the event loop from other requests."""
    await asyncio.sleep(0)
    if len(text) < ENCODE_IN_THREAD:
        return services.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(services.tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def spell_breakers(services: Services, body: SamplingFields) -> tuple[Breaker, ...]:
    """DRY's sequence breakers as tokens, which are looked for in the whole vocabulary: the others' streams go on."""
    if not body.breakers:
        return ()
    return await asyncio.to_thread(services.tokenizer.spell_breakers, body.breakers, services.info().vocab_size)


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """The result of the work, which is cancelled if the client leaves; raises ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    await wait_unless_gone(request, task)
    return await task


@dataclass(slots=True)
class WholeChoice:
    """The pieces of one choice put together."""

    text: str
    tokens: list[OutputToken]
    finish_reason: Any = None
    stop_reason: str | int | None = None
    beam: BeamScore | None = None


async def collect(run: Run) -> list[WholeChoice]:
    """All choices in order, when all of them have ended."""
    choices = [WholeChoice("", []) for _ in range(len(run.prompts) * run.plan.n)]
    texts: list[list[str]] = [[] for _ in choices]
    async with aclosing(run.pieces()) as pieces:
        async for index, piece in pieces:
            texts[index].append(piece.text)
            _add(choices[index], piece)
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    return choices


def _add(choice: WholeChoice, piece: Piece) -> None:
    choice.tokens += piece.tokens
    if piece.finish_reason is not None:
        choice.finish_reason = piece.finish_reason
        choice.stop_reason = piece.stop_reason
        choice.beam = piece.beam


def score_of(beam: BeamScore | None) -> dict[str, Any]:
    """The properties of a choice that beam search found."""
    return {} if beam is None else {"score": beam.score, "cumulative_logprob": beam.cumulative_logprob}


def make_usage(run: Run) -> Usage:
    """Tokens so far: each prompt counts once, however many choices it has."""
    prompt, completion = run.num_prompt_tokens, run.num_completion_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=run.num_cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=run.num_accepted, rejected_prediction_tokens=run.num_rejected
        ),
    )


class UsageReport:
    """What the chunks of a stream say about usage."""

    def __init__(self, run: Run, options: StreamOptions | None) -> None:
        self._run = run
        self._continuous = bool(options and options.continuous_usage_stats)
        self.at_end = bool(options and options.include_usage)
        """Whether a last chunk without choices brings the usage."""

    def in_chunk(self) -> dict[str, Usage | None]:
        """The chunk's `usage` property, if it has one."""
        if self._continuous:
            return {"usage": make_usage(self._run)}
        return {"usage": None} if self.at_end else {}
