"""A request in flight: its prompts run in the engine side by side and come back as events."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from model_runner.contract import Failure, TokenLogprobs
from scheduler.interface import EngineRequest, RequestOutput
from server.engine.client import EngineClient, EngineUnavailableError, OutputStream, QueueFullError, RequestFailedError
from server.errors import (
    ApiError,
    InternalError,
    InvalidRequestError,
    RateLimitError,
    RequestTimeoutError,
    UnavailableError,
)
from server.generation.choice import ChoiceParts, ChoiceText
from server.generation.events import ChoiceEnd, Event, TextDelta, Usage
from server.generation.planning.plan import OutputOptions, Plan
from server.storage.usage import Used
from server.telemetry.metrics import EndReason
from server.telemetry.request_trace import GenerationTrace, PromptTrace
from server.text.tokenizer import Tokenizer


def from_failure(failure: Failure) -> ApiError:
    """The error for a choice that failed in the engine."""
    if failure.by_request:
        return InvalidRequestError(f"{failure.message[0].upper()}{failure.message[1:]}.", code="no_token_left")
    return InternalError(f"The engine could not complete this request: {failure.message}")


def from_engine(error: Exception) -> ApiError | None:
    """The error for one of the engine client's; None for anything else."""
    if isinstance(error, QueueFullError):
        message = "The server has as many requests as it can hold. Please try again later."
        return RateLimitError(message, code="rate_limit_exceeded")
    if isinstance(error, EngineUnavailableError):
        return UnavailableError(f"The engine is not ready: {error}" if str(error) else "The engine is not ready.")
    if isinstance(error, RequestFailedError):
        return InternalError(f"The engine could not complete this request: {error}")
    return None


_AT_A_TIME = 32
"""Prompts that are submitted before others get a turn."""
_RETRY_S = 0.05
"""Between two tries to submit one of a request that has been accepted."""


class PromptRun:
    """One prompt: its choices, and what the engine said about the prompt itself."""

    def __init__(
        self, index: int, request: EngineRequest, choices: tuple[ChoiceText | ChoiceParts, ...], trace: GenerationTrace
    ) -> None:
        self.index = index
        self.request = request
        self.choices = choices
        self.stream: OutputStream | None = None
        """Once the engine has taken it."""
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        """One for each prompt token but the first, once they are known."""
        self.pooled = b""
        """The numbers that were asked for in place of answers, as float32."""
        self.num_cached_tokens = 0
        self.num_written_tokens = 0
        """Of the prompt, to the prefix cache."""
        self.num_unfinished = len(choices)
        self._beam_tokens = 0
        """Drawn by all beams, where it is a search."""
        self._early: list[RequestOutput] = []
        self._trace = trace

    @property
    def num_drawn(self) -> int:
        """Tokens that were drawn for its choices: more than these have, where a search compared others with them."""
        return self._beam_tokens or sum(choice.num_tokens for choice in self.choices)

    def arrange(self, output: RequestOutput) -> Sequence[RequestOutput]:
        """The outputs that may be shown now: none before the logprobs of the prompt, if the request asked for them."""
        self._beam_tokens = output.beam_tokens
        if self.prompt_logprobs is not None:
            return (output,)
        if output.choice == 0:
            self.prompt_logprobs = output.prompt_logprobs
            self.num_cached_tokens = output.num_cached_tokens
            self.num_written_tokens = output.num_written_tokens
            if output.error is None:
                self._trace.prefilled(self.index, len(self.request.prompt), output.num_cached_tokens)
            self.pooled = output.pooled
            early, self._early = self._early, []
            return (output, *early)
        if self.request.sampling.prompt_logprobs is None:
            return (output,)
        self._early.append(output)
        return ()


class Run:
    """All prompts of one request: `submit`, alternate `wait` and `take` until `wait` returns False, then `close`."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        plan: Plan,
        trace: GenerationTrace,
        settle: Callable[[Used], None],
        *,
        timeout_s: float,
    ) -> None:
        """`settle` is told in the end, perhaps several times, what was used."""
        self.plan = plan
        self.prompts = tuple(
            PromptRun(
                index,
                request,
                tuple(
                    _choice(tokenizer, request.prompt, plan.options, index * plan.n + choice.index)
                    for choice in request.choices
                ),
                trace,
            )
            for index, request in enumerate(plan.requests)
        )
        self.num_accepted = 0
        """Draft tokens that became part of the answer, and ..."""
        self.num_rejected = 0
        """... those that did not."""
        self._num_submitted = 0
        self._engine = engine
        self._trace = trace
        self._settle = settle
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._is_woken = False
        self._running = list(self.prompts)
        self._error: Exception | None = None
        self._deadline = self._loop.call_later(timeout_s, self._expire)
        self._waker: asyncio.TimerHandle | None = None

    @property
    def usage(self) -> Usage:
        """Right at any moment between two events."""
        return Usage(
            prompt_tokens=sum(len(prompt.request.prompt) for prompt in self.prompts),
            completion_tokens=sum(choice.num_tokens for prompt in self.prompts for choice in prompt.choices),
            cached_tokens=sum(prompt.num_cached_tokens for prompt in self.prompts),
            cache_written_tokens=sum(prompt.num_written_tokens for prompt in self.prompts),
            accepted_drafts=self.num_accepted,
            rejected_drafts=self.num_rejected,
            reasoning_tokens=sum(choice.num_reasoning_tokens for prompt in self.prompts for choice in prompt.choices),
        )

    @property
    def _used(self) -> Used:
        """Of what the engine has taken, with what guides and beams that are not returned cost."""
        taken = self.prompts[: self._num_submitted]
        return Used(
            requests=1 if taken else 0,
            prompt_tokens=sum(prompt.request.num_input for prompt in taken),
            cached_tokens=sum(prompt.num_cached_tokens for prompt in taken),
            completion_tokens=sum(prompt.num_drawn for prompt in taken),
        )

    def seconds_of(self, prompt: int, choice: int) -> tuple[float, float]:
        """How long a choice took to its first token, from the request's arrival, and from there to its last token."""
        return self._trace.seconds_of((prompt, choice))

    async def submit(self) -> None:
        """Give all prompts to the engine, or as many as the plan gives it at a time; the others follow as these end.

        Raises ApiError if the engine does not take all of them, or the first of those that follow each other; those
        that it has taken are aborted then.
        """
        try:
            for prompt in self.prompts if self.plan.at_a_time is None else self.prompts[:1]:
                self._submit(prompt)
                if prompt.index % _AT_A_TIME == _AT_A_TIME - 1:  # others get a turn
                    await asyncio.sleep(0)
            self._fill()
        except BaseException as error:
            self.close()
            known = from_engine(error) if isinstance(error, Exception) else None
            if known is None:
                raise
            raise known from error

    def _fill(self) -> None:
        """Submit as many more as the plan gives the engine at a time: with one of them accepted, the others wait."""
        for _ in range(_AT_A_TIME):
            num_ended = len(self.prompts) - len(self._running)
            is_full = self._num_submitted - num_ended >= (self.plan.at_a_time or 0)
            if is_full or self._num_submitted == len(self.prompts):
                return
            try:
                self._submit(self.prompts[self._num_submitted])
            except QueueFullError:
                self._wake_in(_RETRY_S)
                return
        self._wake_in(0.0)

    def _wake_in(self, delay_s: float) -> None:
        if self._waker is not None:
            self._waker.cancel()
        self._waker = self._loop.call_later(delay_s, self.wake)

    def _submit(self, prompt: PromptRun) -> None:
        trace = PromptTrace(self._trace, prompt.index, prompt.request.request_id)
        prompt.stream = self._engine.submit(prompt.request, self.wake, trace)
        self._trace.admitted(trace, prompt.request)
        self._num_submitted += 1

    async def wait(self) -> bool:
        """Return when there may be something to take: True, or False when every choice has ended."""
        if not self._running and self._error is None:
            return False
        if not self._is_woken:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_woken = False
        return True

    def wake(self) -> None:
        """Have `wait` return, whether or not there is anything to take."""
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> Iterator[Event]:
        """What has happened since the last time, in order; a choice's last event is its ChoiceEnd.

        Raises ApiError, after the events that came before it, or whatever the engine client raised.
        """
        try:
            now = time.perf_counter()
            for prompt in list(self._running):
                if prompt.stream is None:
                    continue
                for output in prompt.stream.take():
                    for shown in prompt.arrange(output):
                        yield from self._advance(prompt, shown, now)
                if prompt.stream.error is not None:
                    raise prompt.stream.error
            if self._error is not None:
                raise self._error
            self._fill()
        except Exception as error:
            known = from_engine(error) or error
            self.close(known)
            if known is error:
                raise
            raise known from error

    def close(self, error: Exception | None = None) -> None:
        """End all that still runs in the engine: because of this error, or because nobody wants it any more."""
        self._deadline.cancel()
        if self._waker is not None:
            self._waker.cancel()
        self._trace.close("abort" if error is None else _reason(error), error)
        self._settle(self._used)
        for prompt in self._running:
            if prompt.stream is not None:
                prompt.stream.close()
        self._running.clear()

    def _expire(self) -> None:
        """The time limit does not wait for a client that does not read."""
        self._error = RequestTimeoutError("The request took longer than this server allows.")
        for prompt in self._running:
            if prompt.stream is not None:
                prompt.stream.close()
        self.wake()

    def _advance(self, prompt: PromptRun, output: RequestOutput, now: float) -> Sequence[Event]:
        """One output of one choice."""
        if output.error is not None:
            raise from_failure(output.error)
        choice = prompt.choices[output.choice]
        if choice.has_ended:  # it reached a stop string, and this was already under way
            return ()
        before = choice.num_tokens
        events = choice.push(output)
        num_tokens = choice.num_tokens - before
        if output.num_accepted or output.num_rejected:
            self._count_drafts(output, num_tokens)
        self._trace.tokens((prompt.index, output.choice), num_tokens, now)
        if self._trace.request.output is not None:
            self._trace.request.output += "".join(event.text for event in events if isinstance(event, TextDelta))
        if events and isinstance(end := events[-1], ChoiceEnd):
            self._trace.choice_end((prompt.index, output.choice), end.reason)
            self._end_choice(prompt, output)
        return events

    def _end_choice(self, prompt: PromptRun, output: RequestOutput) -> None:
        """The engine is told if it does not know."""
        if output.finish_reason is None:
            self._engine.abort_choice(prompt.request.request_id, output.choice)
        prompt.num_unfinished -= 1
        if not prompt.num_unfinished:
            self._running.remove(prompt)
            self._trace.prompt_end(prompt.index, [choice.num_tokens for choice in prompt.choices])
        if not self._running:
            self._deadline.cancel()

    def _count_drafts(self, output: RequestOutput, num_kept: int) -> None:
        """Accepted drafts come first among a step's tokens; a stop string cuts off those behind it."""
        accepted = min(output.num_accepted, num_kept)
        self.num_accepted += accepted
        self.num_rejected += output.num_rejected + output.num_accepted - accepted


def _choice(
    tokenizer: Tokenizer, prompt: Sequence[int], options: OutputOptions, index: int
) -> ChoiceText | ChoiceParts:
    if options.reading is None:
        return ChoiceText(tokenizer, prompt, options, index)
    return ChoiceParts(tokenizer, prompt, options, options.reading, index)


def _reason(error: Exception) -> EndReason:
    """Why the choices end that ran when it came; those beside a prompt for which there was no room are given up."""
    if isinstance(error, RequestTimeoutError):
        return "timeout"
    return "abort" if isinstance(error, RateLimitError) else "error"
