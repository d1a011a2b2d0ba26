"""Timeline of a request: times and counts, never content.

All times are seconds on the clock of time.perf_counter unless stated otherwise.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from scheduler.interface import ChoiceHistory, MethodDrafts
from server.telemetry.metrics import EndReason

MAX_LISTED_CHOICES: Final = 32
"""Choices of a request that its timeline lists."""


@dataclass(frozen=True, slots=True)
class ChoiceTimeline:
    """The timeline of one choice."""

    prompt: int
    """Index of the prompt that it answers."""
    choice: int
    """Index among the prompt's choices."""
    finish_reason: EndReason | None
    """None while it runs."""
    history: ChoiceHistory | None
    """Report of the last engine that had it; None without a report."""
    restarts: tuple[float, ...]
    """When an engine died with its prompt, which then continued in the next one. Work before that is not included."""


@dataclass(frozen=True, slots=True)
class EngineWork:
    """The engine's work for all choices of a request together."""

    arrived_at: float
    """When the first choice arrived in the engine; after a restart, in the last engine."""
    admitted_at: float | None
    """When the first choice was admitted; None if none has left the queue."""
    first_token_at: float | None
    """When the first choice had its first token; None without one."""
    ended_at: float
    """When the last choice ended. For running choices, the time of this report."""
    steps: int
    """Steps summed over choices: a step that computes two choices counts twice."""
    prefill_steps: int
    preemptions: int
    waited_again_s: float
    drafts: tuple[MethodDrafts, ...]
    """Accepted and rejected draft tokens by method."""

    @property
    def queue_s(self) -> float:
        """Seconds in the queue, until the first choice was admitted or until `ended_at`."""
        return (self.ended_at if self.admitted_at is None else self.admitted_at) - self.arrived_at

    @property
    def prefill_s(self) -> float | None:
        """Seconds from admission to the first token or until `ended_at`; None before admission."""
        if self.admitted_at is None:
            return None
        return (self.ended_at if self.first_token_at is None else self.first_token_at) - self.admitted_at

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token until `ended_at`; None before the first token."""
        return None if self.first_token_at is None else self.ended_at - self.first_token_at

    @property
    def inference_s(self) -> float | None:
        """Seconds of prefill and decode together; None before admission."""
        return None if self.admitted_at is None else self.ended_at - self.admitted_at


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """The timeline of a request once the engine has accepted one of its prompts."""

    request_id: str
    answer_id: str
    client: str
    """Name of the client's key; empty on a server without keys."""
    endpoint: str
    """The URL path."""
    model: str
    is_background: bool
    """Whether it ran only in capacity that other requests left."""
    started_unix: float
    """Start in Unix time (seconds)."""
    started_at: float
    as_of: float
    """When this was recorded. For an ended request, when its response and its consumer had ended."""
    has_ended: bool
    status: int | None
    """Status of the HTTP response, or of the error that ended a stream; None before the response has ended."""
    error: str | None
    """Class name of the error."""
    prompt_tokens: int
    cached_tokens: int
    """Part of `prompt_tokens` found in the prefix cache; each prompt counts once."""
    output_tokens: int
    """Tokens of all choices of the answer."""
    time_to_first_token_s: float | None
    work: EngineWork | None
    """None without any report of an engine."""
    restarts: tuple[float, ...]
    """When an engine died with it. Of several prompts, the one with the most restarts counts."""
    max_tokens: int
    """Limit for each choice."""
    num_choices: int
    """Choices that the engine has accepted."""
    choices: tuple[ChoiceTimeline, ...]
    """The first choices, at most MAX_LISTED_CHOICES."""
    trace_context: Mapping[str, str]
    """The client's `traceparent` and `tracestate` headers."""

    def unix(self, at: float) -> float:
        """The moment as Unix time in seconds."""
        return self.started_unix + (at - self.started_at)


def work_of(histories: Collection[ChoiceHistory]) -> EngineWork | None:
    """The work of all choices together; None without any."""
    if not histories:
        return None
    admissions = [history.admitted_at for history in histories if history.admitted_at is not None]
    first_tokens = [history.first_token_at for history in histories if history.first_token_at is not None]
    return EngineWork(
        arrived_at=min(history.arrived_at for history in histories),
        admitted_at=min(admissions, default=None),
        first_token_at=min(first_tokens, default=None),
        ended_at=max(history.as_of for history in histories),
        steps=sum(history.steps for history in histories),
        prefill_steps=sum(history.prefill_steps for history in histories),
        preemptions=sum(history.preemptions for history in histories),
        waited_again_s=sum(history.waited_again_s for history in histories),
        drafts=_summed(drafts for history in histories for drafts in history.drafts),
    )


def _summed(drafts: Iterable[MethodDrafts]) -> tuple[MethodDrafts, ...]:
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for one in drafts:
        counts[one.method][0] += one.accepted
        counts[one.method][1] += one.rejected
    return tuple(MethodDrafts(method, *both) for method, both in sorted(counts.items()))
