"""What became of a request, in times and counts. Never what it said.

All times are seconds on the clock of time.perf_counter, if nothing else is said.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from scheduler.history import ChoiceHistory, MethodDrafts
from server.telemetry.metrics import EndReason

MAX_LISTED_CHOICES: Final = 32
"""Choices of a request that its timeline lists."""


@dataclass(frozen=True, slots=True)
class ChoiceTimeline:
    """One choice."""

    prompt: int
    """The index of the prompt that it answers."""
    choice: int
    """Its own, among the prompt's."""
    finish_reason: EndReason | None
    """None while it runs."""
    history: ChoiceHistory | None
    """Of the last engine that had it; None where no engine has told."""
    restarts: tuple[float, ...]
    """When an engine died with its prompt, which went on in the next one. What was done until then nobody has told."""


@dataclass(frozen=True, slots=True)
class EngineWork:
    """What the engine did for all choices together."""

    arrived_at: float
    """Of the first choice, and so are the next two. What went on after a restart arrived in the next engine."""
    admitted_at: float | None
    """None while all are in the queue, or if they never left it."""
    first_token_at: float | None
    """None before there is one, and where there is none to come."""
    ended_at: float
    """Of the last choice; of those that run, the time until when this is told."""
    steps: int
    """Of single choices: a step that computed something for two of them counts twice."""
    prefill_steps: int
    preemptions: int
    waited_again_s: float
    drafts: tuple[MethodDrafts, ...]
    """By method."""

    @property
    def queue_s(self) -> float:
        """Until a choice was admitted, or on."""
        return (self.ended_at if self.admitted_at is None else self.admitted_at) - self.arrived_at

    @property
    def prefill_s(self) -> float | None:
        """From there to the first token, or on; None before it."""
        if self.admitted_at is None:
            return None
        return (self.ended_at if self.first_token_at is None else self.first_token_at) - self.admitted_at

    @property
    def decode_s(self) -> float | None:
        """From the first token to the end of the last choice; None before it."""
        return None if self.first_token_at is None else self.ended_at - self.first_token_at

    @property
    def inference_s(self) -> float | None:
        """The last two together."""
        return None if self.admitted_at is None else self.ended_at - self.admitted_at


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """A request that the engine has taken, or a part of."""

    request_id: str
    answer_id: str
    client: str
    """The name of its key; empty where there are no keys."""
    endpoint: str
    """The path."""
    model: str
    is_background: bool
    """Whether it got only the room that others left."""
    started_unix: float
    """Unix time in seconds."""
    started_at: float
    as_of: float
    """When this was so. If it has ended: when it was answered, and nobody waited for more."""
    has_ended: bool
    status: int | None
    """Of the HTTP response; that of the error where one has ended a stream. None before there is one."""
    error: str | None
    """The class of what went wrong."""
    prompt_tokens: int
    cached_tokens: int
    """Of these, found in the prefix cache; each prompt counts once."""
    output_tokens: int
    """Of the answer."""
    time_to_first_token_s: float | None
    work: EngineWork | None
    """None where no engine has told anything."""
    restarts: tuple[float, ...]
    """When an engine died with it; of several prompts, those of the one that this befell most often."""
    max_tokens: int
    """Of each choice."""
    num_choices: int
    """That the engine has taken."""
    choices: tuple[ChoiceTimeline, ...]
    """The first of them, at most MAX_LISTED_CHOICES."""
    trace_context: Mapping[str, str]
    """What the client says of the trace that it belongs to: traceparent and tracestate."""

    def unix(self, at: float) -> float:
        """The moment as Unix time in seconds."""
        return self.started_unix + (at - self.started_at)


def work_of(histories: Collection[ChoiceHistory]) -> EngineWork | None:
    """All of them together; None if there are none."""
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
