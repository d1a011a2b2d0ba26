"""A request in flight: its prompts run in the engine side by side and come back as pieces of text."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from model_runner.contract import TokenLogprobs
from scheduler.interface import EngineRequest, RequestOutput
from server.engine.client import EngineClient
from server.errors import RateLimitError, RequestTimeoutError, from_engine, from_failure
from server.telemetry.metrics import EndReason
from server.generation.choice_text import ChoiceText, Piece
from server.telemetry.request_meter import Meter
from server.generation.planning.planner import Plan
from server.text.tokenizer import Tokenizer

_Event = tuple["PromptRun", RequestOutput | Exception | None]


class PromptRun:
    """One prompt: its choices, and what the engine said about the prompt itself."""

    def __init__(self, index: int, request: EngineRequest, choices: tuple[ChoiceText, ...]) -> None:
        self.index = index
        self.request = request
        self.choices = choices
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        """One for each prompt token but the first, once they are known."""
        self.num_cached_tokens = 0
        self._early: list[RequestOutput] = []

    @property
    def unfinished(self) -> bool:
        return any(choice.finish_reason is None for choice in self.choices)

    def arrange(self, output: RequestOutput) -> Iterator[RequestOutput]:
        """The outputs that may be shown now: none before the logprobs of the prompt, if the request asked for them."""
        if output.choice == 0 and self.prompt_logprobs is None:
            self.prompt_logprobs = output.prompt_logprobs
            self.num_cached_tokens = output.num_cached_tokens
            yield output
            yield from self._early
            self._early.clear()
        elif self.prompt_logprobs is None and self.request.sampling.prompt_logprobs is not None:
            self._early.append(output)
        else:
            yield output


class Run:
    """All prompts of one request. Iterate `pieces` once; the counts are right at any moment in between."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, plan: Plan, meter: Meter, *, timeout_s: float
    ) -> None:
        self.plan = plan
        self._engine = engine
        self._meter = meter
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self.num_accepted = 0
        """Draft tokens that became part of the answer, and ..."""
        self.num_rejected = 0
        """... those that did not."""
        self.prompts = tuple(
            PromptRun(
                index,
                request,
                tuple(ChoiceText(tokenizer, request.prompt, plan.options) for _ in request.choices),
            )
            for index, request in enumerate(plan.requests)
        )

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.request.prompt) for prompt in self.prompts)

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for prompt in self.prompts for choice in prompt.choices)

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.num_cached_tokens for prompt in self.prompts)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece]]:
        """(index of the choice, piece) as they come; a choice's index is prompt * n + its number.

        Every choice ends with a piece that has a finish reason. Leaving early ends all that still runs in the engine.
        Raises ApiError, or whatever the engine client raised.
        """
        events: asyncio.Queue[_Event] = asyncio.Queue()
        pumps = [asyncio.create_task(self._pump(prompt, events)) for prompt in self.prompts]
        try:
            running = len(pumps)
            while running:
                prompt, event = await events.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    running -= 1
                    continue
                for output in prompt.arrange(event):
                    index = prompt.index * self.plan.n + output.choice
                    piece = self._advance(prompt, output)
                    if piece is not None:
                        yield index, piece
        except Exception as error:
            self._meter.end(_reason(error))
            raise
        finally:
            self._meter.end("abort")
            for pump in pumps:
                pump.cancel()

    async def _pump(self, prompt: PromptRun, events: asyncio.Queue[_Event]) -> None:
        """Move one prompt's outputs into the common queue, then None or what went wrong.

        The time limit is kept here and not by the reader, who may be waiting for a client that does not read.
        """
        stream = self._engine.generate(prompt.request, partial(self._meter.admitted, prompt.request))
        try:
            async with asyncio.timeout_at(self._deadline), aclosing(stream) as outputs:
                async for output in outputs:
                    events.put_nowait((prompt, output))
            events.put_nowait((prompt, None))
        except TimeoutError:
            events.put_nowait((prompt, RequestTimeoutError("The request took longer than this server allows.")))
        except Exception as error:  # noqa: BLE001 - raised again by the reader
            events.put_nowait((prompt, from_engine(error) or error))

    def _advance(self, prompt: PromptRun, output: RequestOutput) -> Piece | None:
        """One output of one choice; None if it shows nothing."""
        if output.error is not None:
            raise from_failure(output.error)
        choice = prompt.choices[output.choice]
        if choice.finish_reason is not None:  # it reached a stop string, and this was already under way
            return None
        before = choice.num_tokens
        piece = replace(choice.push(output), beam=output.beam)
        num_tokens = choice.num_tokens - before
        self._count_drafts(output, num_tokens)
        self._meter.tokens((prompt.index, output.choice), num_tokens, piece.text)
        if piece.finish_reason is not None:
            self._meter.choice_end(piece.finish_reason)
            if output.finish_reason is None:
                self._engine.abort_choice(prompt.request.request_id, output.choice)
            if not prompt.unfinished:
                self._meter.prompt_end(sum(choice.num_tokens for choice in prompt.choices))
        return piece if piece.text or piece.finish_reason is not None else None

    def _count_drafts(self, output: RequestOutput, num_kept: int) -> None:
        """Accepted drafts come first among a step's tokens; a stop string cuts off those behind it."""
        accepted = min(output.num_accepted, num_kept)
        self.num_accepted += accepted
        self.num_rejected += output.num_rejected + output.num_accepted - accepted


def _reason(error: Exception) -> EndReason:
    """Why the choices end that ran when it came; those beside a prompt for which there was no room are given up."""
    if isinstance(error, RequestTimeoutError):
        return "timeout"
    return "abort" if isinstance(error, RateLimitError) else "error"
