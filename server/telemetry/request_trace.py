"""Traces of requests, read by the metrics, the access log, the spans and /v1/requests.

A RequestTrace exists for each HTTP request, a GenerationTrace for each request that runs in the engine, and a
PromptTrace for each of its prompts. All times are seconds on the clock of time.perf_counter unless their name says
otherwise.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice

from scheduler.interface import ChoiceHistory, EngineRequest
from server.telemetry.metrics import EndReason, Metrics
from server.telemetry.timeline import MAX_LISTED_CHOICES, ChoiceTimeline, RequestTimeline, work_of

CLIENT_CLOSED = 499
"""Status of a request whose client left before the response began."""

ChoiceKey = tuple[int, int]
"""The index of a prompt, and the index of a choice among the prompt's."""


@dataclass(frozen=True, slots=True)
class Sender:
    """The client that sent a body; work done before a request is known is shared fairly between clients."""

    name: str
    is_background: bool = False
    """Whether the server sent the body to itself, so that no client waits for it."""
    date: datetime | None = field(default=None, compare=False)
    """The date that chat templates show; None: now."""


@dataclass(slots=True)
class RequestTrace:
    """One HTTP request, from its arrival to the end of its response. Every layer fills in what it learns."""

    request_id: str
    path: str = ""
    model: str | None = None
    """The model that it is for; None: it needs none, or none is chosen yet."""
    answer_id: str | None = None
    """Id of the answer; the ids of its requests in the engine's log begin with it."""
    client: str = ""
    """Name of the client's API key (no secret); empty on a server without keys."""
    is_background: bool = False
    """Whether the server sent the request to itself, so that no client waits for this answer."""
    date: datetime | None = None
    """The date that chat templates show; None: now. All lines of a batch have the same."""
    keep_s: float | None = None
    """For how many seconds the model shall stay loaded afterwards; None: as the operator has set."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers that the response gets, whether it succeeds or fails."""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """The client's `traceparent` and `tracestate` headers."""
    started: float = field(default_factory=time.perf_counter)
    status: int = CLIENT_CLOSED
    stream_error: int | None = None
    """Status of the error that ended a stream after a successful status had been sent."""
    error: str | None = None
    """Class name of the error that ended the request."""
    answered_at: float | None = None
    """When the response ended. Background work that has no response sets it at the start."""
    on_answered: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks for the end of the response."""
    tokens_in: int | None = None
    tokens_out: int | None = None
    ttft_s: float | None = None
    """Seconds from arrival to the first token."""
    prompt: str | None = None
    """Text of the prompts; set only with --log-prompts, like `output`."""
    output: str | None = None

    def answered(self) -> None:
        """Record that the response has ended."""
        self.answered_at = time.perf_counter()
        for callback in self.on_answered:
            callback()

    @property
    def ids(self) -> dict[str, str | None]:
        """The ids that a log line about this request carries."""
        return {"request_id": self.request_id, "answer_id": self.answer_id}


class GenerationTrace:
    """Generation of one request in the engine: feeds the metrics and builds the request's timeline.

    It ends when the response has ended, no consumer waits for its choices, and the engine has reported all of them.
    """

    def __init__(
        self,
        request: RequestTrace,
        model: str,
        metrics: Metrics,
        on_taken: Callable[["GenerationTrace"], None],
        on_ended: Callable[["GenerationTrace"], None],
    ) -> None:
        """`on_taken` is called when the engine takes the first prompt, then `on_ended` once."""
        self.request = request
        self.started_unix = time.time() - (time.perf_counter() - request.started)
        self._model = model
        self._metrics = metrics
        self._on_taken = on_taken
        self._on_ended = on_ended
        self._prompts: dict[int, PromptTrace] = {}
        self._cached: dict[int, int] = {}
        """Cached tokens by prompt, as the answer reports them."""
        self._reasons: dict[ChoiceKey, EndReason | None] = {}
        """Why each choice ended; None while it runs."""
        self._histories: dict[ChoiceKey, ChoiceHistory | None] = {}
        """The engine's final reports."""
        self._first: dict[ChoiceKey, float] = {}
        self._last: dict[ChoiceKey, float] = {}
        """When the first and the last token of each choice arrived."""
        self._max_tokens = 0
        self._closed_at: float | None = None
        self._has_ended = False

    def admitted(self, prompt: "PromptTrace", request: EngineRequest) -> None:
        """The engine has taken a prompt."""
        is_first = not self._prompts
        self._prompts[prompt.index] = prompt
        self._max_tokens = request.max_tokens
        self._reasons.update(((prompt.index, choice.index), None) for choice in request.choices)
        if is_first:
            if self.request.answered_at is None:
                self.request.on_answered.append(self._end_if_over)
            self._on_taken(self)
        self._metrics.observe_start(len(request.prompt), request.max_tokens, len(request.choices))

    def prefilled(self, prompt: int, num_tokens: int, num_cached: int) -> None:
        """The engine has computed a prompt of `num_tokens`, of which `num_cached` were in the prefix cache."""
        self._cached[prompt] = num_cached
        self._metrics.observe_prefill(num_tokens, num_cached)

    def tokens(self, choice: ChoiceKey, count: int, now: float) -> None:
        """`count` tokens of a choice arrived at `now`."""
        if not count:
            return
        request, metrics = self.request, self._metrics
        if request.ttft_s is None:
            request.ttft_s = now - request.started
            if not request.is_background:
                metrics.observe_first_token(request.ttft_s)
        since = None
        if (last := self._last.get(choice)) is None:
            self._first[choice] = now
        elif not request.is_background:
            since = now - last
        self._last[choice] = now
        metrics.generated.observe(count, since)
        request.tokens_out = (request.tokens_out or 0) + count

    def seconds_of(self, choice: ChoiceKey) -> tuple[float, float]:
        """Seconds from the request's arrival to a choice's first token (or until now), and from there to its last."""
        first = self._first.get(choice)
        if first is None:
            return time.perf_counter() - self.request.started, 0.0
        return first - self.request.started, self._last[choice] - first

    def choice_end(self, choice: ChoiceKey, reason: EndReason) -> None:
        """A choice has ended for this reason."""
        self._reasons[choice] = reason
        self._metrics.observe_choice_end(reason)

    def prompt_end(self, prompt: int, num_tokens: Sequence[int]) -> None:
        """All choices of a prompt have ended; `num_tokens` has the tokens of each."""
        if self.request.is_background:
            return
        self._metrics.observe_end(time.perf_counter() - self.request.started, num_tokens)
        for index, count in enumerate(num_tokens):
            if count > 1:
                seconds = self._last[prompt, index] - self._first[prompt, index]
                self._metrics.observe_time_per_output_token(seconds / (count - 1))

    def close(self, reason: EndReason, error: Exception | None = None) -> None:
        """No consumer waits any more; choices that still run end for this reason. Later calls change nothing."""
        if error is not None:
            self.request.error = type(error).__name__
        for choice in [choice for choice, known in self._reasons.items() if known is None]:
            self.choice_end(choice, reason)
        if self._closed_at is None:
            self._closed_at = time.perf_counter()
            self._end_if_over()

    def reported(self, choice: ChoiceKey, history: ChoiceHistory | None) -> None:
        """The engine's final report about a choice; None if no engine has one."""
        self._histories[choice] = history
        self._end_if_over()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def answer_id(self) -> str:
        """Empty until the answer has an id."""
        return self.request.answer_id or ""

    @property
    def unreported(self) -> dict[int, str]:
        """By prompt index, the ids of engine requests with listed choices that the engine has not yet reported."""
        indices = dict.fromkeys(prompt for prompt, choice in self._listed if (prompt, choice) not in self._histories)
        return {index: self._prompts[index].request_id for index in indices}

    def timeline(self, explained: Mapping[ChoiceKey, ChoiceHistory]) -> RequestTimeline:
        """The timeline as of now; `explained` has the state of choices that still run in the engine."""
        as_of = time.perf_counter() if self._over_at is None else self._over_at
        histories = {
            key: None if history is None else history.until(as_of)
            for key, history in {**explained, **self._histories}.items()
        }
        known = {key: history for key, history in histories.items() if history is not None}
        request = self.request
        return RequestTimeline(
            request_id=self.request_id,
            answer_id=self.answer_id,
            client=request.client,
            endpoint=request.path,
            model=self._model,
            is_background=request.is_background,
            started_unix=self.started_unix,
            started_at=request.started,
            as_of=as_of,
            has_ended=self._has_ended,
            status=None if request.answered_at is None else request.stream_error or request.status,
            error=request.error,
            prompt_tokens=request.tokens_in or 0,
            cached_tokens=sum({**_cached_by_prompt(known), **self._cached}.values()),
            output_tokens=request.tokens_out or 0,
            time_to_first_token_s=request.ttft_s,
            work=work_of(known.values()),
            restarts=max((tuple(prompt.restarts) for prompt in self._prompts.values()), key=len, default=()),
            max_tokens=self._max_tokens,
            num_choices=len(self._reasons),
            choices=tuple(
                ChoiceTimeline(*key, self._reasons[key], histories.get(key), tuple(self._prompts[key[0]].restarts))
                for key in self._listed
            ),
            trace_context=request.trace_context,
        )

    @property
    def _listed(self) -> list[ChoiceKey]:
        return list(islice(self._reasons, MAX_LISTED_CHOICES))

    @property
    def _over_at(self) -> float | None:
        """When both the response and its consumer had ended. The engine may report a step later."""
        if self._closed_at is None or self.request.answered_at is None:
            return None
        return max(self._closed_at, self.request.answered_at)

    def _end_if_over(self) -> None:
        all_reported = bool(self._prompts) and len(self._histories) == len(self._reasons)
        if all_reported and self._over_at is not None and not self._has_ended:
            self._has_ended = True
            self._on_ended(self)


class PromptTrace:
    """One prompt of a request. Implements the engine's Follower."""

    def __init__(self, generation: GenerationTrace, index: int, request_id: str) -> None:
        """`request_id` is the engine's id of the prompt."""
        self.index = index
        self.request_id = request_id
        self.restarts: list[float] = []
        """When an engine died with the prompt."""
        self._generation = generation

    def ended(self, choice: int, history: ChoiceHistory | None) -> None:
        self._generation.reported((self.index, choice), history)

    def interrupted(self) -> None:
        self.restarts.append(time.perf_counter())


def _cached_by_prompt(histories: Mapping[ChoiceKey, ChoiceHistory]) -> dict[int, int]:
    """Tokens that the first choice of each prompt found in the prefix cache."""
    cached: dict[int, int] = {}
    for (prompt, _), history in sorted(histories.items()):
        cached.setdefault(prompt, history.cached_tokens)
    return cached
