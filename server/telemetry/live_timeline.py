"""What is noted of a request while it runs, for its timeline."""

import time
from collections.abc import Callable, Mapping
from itertools import islice

from scheduler.history import ChoiceHistory
from scheduler.interface import EngineRequest
from server.telemetry.metrics import EndReason
from server.telemetry.request_record import RequestRecord
from server.telemetry.timeline import MOST_CHOICES, ChoiceTimeline, RequestTimeline, work_of

ChoiceKey = tuple[int, int]
"""The index of its prompt, and its own."""


class LiveTimeline:
    """One request. It has ended when it is answered, nobody waits for its choices, and the engine has told of all."""

    def __init__(
        self,
        record: RequestRecord,
        model: str,
        taken: Callable[["LiveTimeline"], None],
        ended: Callable[["LiveTimeline"], None],
    ) -> None:
        """`taken` is called when the engine takes the first of it; then `ended` is called once."""
        self.record = record
        self._model = model
        self.started_unix = time.time() - (time.perf_counter() - record.started)
        self._taken = taken
        self._ended = ended
        self._prompts: dict[int, PromptTimeline] = {}
        self._cached: dict[int, int] = {}
        """By prompt, what was found in the prefix cache, as the answer tells it."""
        self._histories: dict[ChoiceKey, ChoiceHistory | None] = {}
        self._reasons: dict[ChoiceKey, EndReason | None] = {}
        """None while it runs."""
        self._max_tokens = 0
        self._closed_at: float | None = None
        self._has_ended = False

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def answer_id(self) -> str:
        """Empty before there is one."""
        return self.record.answer_id or ""

    @property
    def asked(self) -> dict[int, str]:
        """By the prompt's index, the engine's requests whose choices are told one by one and have not all ended."""
        open_prompts = dict.fromkeys(
            prompt for prompt, choice in self._shown if (prompt, choice) not in self._histories
        )
        return {index: self._prompts[index].request_id for index in open_prompts}

    def admitted(self, prompt: "PromptTimeline", request: EngineRequest) -> None:
        """The engine has taken a prompt."""
        is_first = not self._prompts
        self._prompts[prompt.index] = prompt
        self._max_tokens = request.max_tokens
        self._reasons.update(((prompt.index, choice.index), None) for choice in request.choices)
        if is_first:
            if self.record.answered_at is None:
                self.record.on_answered.append(self._check)
            self._taken(self)

    def prefilled(self, prompt: int, num_cached: int) -> None:
        """The engine has been through a prompt, of which so much was in the prefix cache. No restart changes that."""
        self._cached[prompt] = num_cached

    def choice_end(self, choice: ChoiceKey, reason: EndReason) -> None:
        """A choice has ended for this reason."""
        self._reasons[choice] = reason

    def close(self) -> None:
        """Nobody waits for its choices any more. Later calls change nothing."""
        if self._closed_at is None:
            self._closed_at = time.perf_counter()
            self._check()

    def told(self, choice: ChoiceKey, history: ChoiceHistory | None) -> None:
        """What the engine says in the end."""
        self._histories[choice] = history
        self._check()

    def timeline(self, explained: Mapping[ChoiceKey, ChoiceHistory]) -> RequestTimeline:
        """As it stands; `explained` says how choices have got on of which the engine has not told the end."""
        as_of = time.perf_counter() if self._over_at is None else self._over_at
        histories = {
            key: None if history is None else history.until(as_of)
            for key, history in {**explained, **self._histories}.items()
        }
        known = {key: history for key, history in histories.items() if history is not None}
        record = self.record
        return RequestTimeline(
            request_id=self.request_id,
            answer_id=self.answer_id,
            client=record.client,
            endpoint=record.path,
            model=self._model,
            is_background=record.is_background,
            started_unix=self.started_unix,
            started_at=record.started,
            as_of=as_of,
            has_ended=self._has_ended,
            status=None if record.answered_at is None else record.stream_error or record.status,
            error=record.error,
            prompt_tokens=record.tokens_in or 0,
            cached_tokens=sum({**_cached_by_prompt(known), **self._cached}.values()),
            output_tokens=record.tokens_out or 0,
            time_to_first_token_s=record.ttft_s,
            work=work_of(known.values()),
            restarts=max((tuple(prompt.restarts) for prompt in self._prompts.values()), key=len, default=()),
            max_tokens=self._max_tokens,
            num_choices=len(self._reasons),
            choices=tuple(
                ChoiceTimeline(*key, self._reasons[key], histories.get(key), tuple(self._prompts[key[0]].restarts))
                for key in self._shown
            ),
            trace_context=record.trace_context,
        )

    @property
    def _shown(self) -> list[ChoiceKey]:
        """The choices that are told one by one."""
        return list(islice(self._reasons, MOST_CHOICES))

    @property
    def _over_at(self) -> float | None:
        """When it was answered and nobody waited any more. The engine may need a step after that, to tell its end."""
        if self._closed_at is None or self.record.answered_at is None:
            return None
        return max(self._closed_at, self.record.answered_at)

    def _check(self) -> None:
        is_told = bool(self._prompts) and len(self._histories) == len(self._reasons)
        if is_told and self._over_at is not None and not self._has_ended:
            self._has_ended = True
            self._ended(self)


class PromptTimeline:
    """One prompt of a request. Implements the engine's Follower."""

    def __init__(self, timeline: LiveTimeline, index: int, request_id: str) -> None:
        """`request_id` is the engine's."""
        self.index = index
        self.request_id = request_id
        self.restarts: list[float] = []
        """When an engine died with it."""
        self._timeline = timeline

    def ended(self, choice: int, history: ChoiceHistory | None) -> None:
        """See Follower."""
        self._timeline.told((self.index, choice), history)

    def interrupted(self) -> None:
        """See Follower."""
        self.restarts.append(time.perf_counter())


def _cached_by_prompt(histories: Mapping[ChoiceKey, ChoiceHistory]) -> dict[int, int]:
    """What the first choice of each found in the prefix cache."""
    cached: dict[int, int] = {}
    for (prompt, _), history in sorted(histories.items()):
        cached.setdefault(prompt, history.cached_tokens)
    return cached
