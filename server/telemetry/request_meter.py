"""Measures one request for the metrics, for its line in the log and for its timeline."""

import time
from collections.abc import Sequence

from scheduler.interface import EngineRequest
from server.telemetry.live_timeline import ChoiceKey, LiveTimeline, PromptTimeline
from server.telemetry.metrics import EndReason, Metrics


class RequestMeter:
    """Told what happens to a request; passes it on to the metrics, the request's record and its timeline."""

    def __init__(self, metrics: Metrics, timeline: LiveTimeline, *, keeps_text: bool = False) -> None:
        """`keeps_text` puts the output into the log."""
        self._metrics = metrics
        self._timeline = timeline
        self._record = timeline.record
        self._first: dict[ChoiceKey, float] = {}  # when the first token of a choice came,
        self._last: dict[ChoiceKey, float] = {}  # and the last
        self._running: set[ChoiceKey] = set()
        """Choices that the engine has taken and that have not ended."""
        self.keeps_text = keeps_text

    def follower(self, prompt: int, request: EngineRequest) -> PromptTimeline:
        """Is to be told by the engine what becomes of the prompt of this index, if it takes it."""
        return PromptTimeline(self._timeline, prompt, request.request_id)

    def admitted(self, follower: PromptTimeline, request: EngineRequest) -> None:
        """The engine has taken one of the prompts, and this follows it."""
        self._running.update((follower.index, choice.index) for choice in request.choices)
        self._timeline.admitted(follower, request)
        self._metrics.observe_start(len(request.prompt), request.max_tokens, len(request.choices))

    def prefilled(self, prompt: int, num_tokens: int, num_cached: int) -> None:
        """The engine has been through a prompt of so many tokens, of which so many were in the prefix cache."""
        self._timeline.prefilled(prompt, num_cached)
        self._metrics.observe_prefill(num_tokens, num_cached)

    def tokens(self, choice: ChoiceKey, count: int, now: float) -> None:
        """`count` tokens of a choice came at this time, on the clock of time.perf_counter."""
        if not count:
            return
        if self._record.ttft_s is None:
            self._record.ttft_s = now - self._record.started
            if not self._record.is_background:
                self._metrics.observe_first_token(self._record.ttft_s)
        since = None
        if (last := self._last.get(choice)) is None:
            self._first[choice] = now
        elif not self._record.is_background:  # nobody waits for what runs there
            since = now - last
        self._last[choice] = now
        self._metrics.generated.observe(count, since)
        self._record.tokens_out = (self._record.tokens_out or 0) + count

    def seconds_of(self, choice: ChoiceKey) -> tuple[float, float]:
        """From the request's arrival to the first token of a choice, or until now; and from there to its last token."""
        first = self._first.get(choice)
        if first is None:
            return time.perf_counter() - self._record.started, 0.0
        return first - self._record.started, self._last[choice] - first

    def text(self, text: str) -> None:
        """They showed this text."""
        self._record.output = (self._record.output or "") + text

    def choice_end(self, choice: ChoiceKey, reason: EndReason) -> None:
        """A choice has ended for this reason."""
        self._running.discard(choice)
        self._timeline.choice_end(choice, reason)
        self._metrics.observe_choice_end(reason)

    def end(self, reason: EndReason, error: Exception | None = None) -> None:
        """All choices that still run end for this reason, and because of the error if there is one."""
        if error is not None:
            self._record.error = type(error).__name__
        for choice in sorted(self._running):
            self.choice_end(choice, reason)
        self._timeline.close()

    def prompt_end(self, prompt: int, num_tokens: Sequence[int]) -> None:
        """All choices of a prompt have ended, with so many tokens each."""
        if self._record.is_background:
            return
        self._metrics.observe_end(time.perf_counter() - self._record.started, num_tokens)
        for index, count in enumerate(num_tokens):
            if count > 1:
                seconds = self._last[prompt, index] - self._first[prompt, index]
                self._metrics.observe_time_per_output_token(seconds / (count - 1))
