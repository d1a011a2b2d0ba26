"""What is noted of a request while it runs, for its timeline."""

import time
from collections.abc import Callable, Mapping

from scheduler.history import ChoiceHistory
from scheduler.interface import EngineRequest
from server.telemetry.metrics import EndReason
from server.telemetry.request_record import RequestRecord
from server.telemetry.timeline import MOST_CHOICES, ChoiceTimeline, RequestTimeline, work_of

ChoiceKey = tuple[int, int]
"""The index of its prompt, and its own."""


class LiveTimeline:
    """One request. It has ended when it is answered, nobody waits for its choices, and the engine has told of all."""

    def __init__(self, record: RequestRecord, model: str, ended: Callable[["LiveTimeline"], None]) -> None:
        """`ended` is called once."""
        self.record = record
        self._model = model
        self._started_unix = time.time() - (time.perf_counter() - record.started)
        self._ended = ended
        self._prompts: dict[int, PromptTimeline] = {}
        self._histories: dict[ChoiceKey, ChoiceHistory | None] = {}
        self._reasons: dict[ChoiceKey, EndReason | None] = {}
        """None while it runs."""
        self._max_tokens = 0
        self._is_closed = False
        self._has_ended = False
        record.on_answered.append(self._check)

    @property
    def is_taken(self) -> bool:
        """Whether the engine has taken any of it."""
        return bool(self._prompts)

    @property
    def asked(self) -> dict[int, str]:
        """By the prompt's index, the engine's requests whose choices are told one by one and have not all ended."""
        open_prompts = dict.fromkeys(
            prompt for prompt, choice in self._first if (prompt, choice) not in self._histories
        )
        return {index: self._prompts[index].request_id for index in open_prompts}

    def admitted(self, prompt: "PromptTimeline", request: EngineRequest) -> None:
        """The engine has taken a prompt."""
        self._prompts[prompt.index] = prompt
        self._max_tokens = request.max_tokens
        self._reasons.update(((prompt.index, choice.index), None) for choice in request.choices)

    def choice_end(self, choice: ChoiceKey, reason: EndReason) -> None:
        """A choice has ended for this reason."""
        self._reasons[choice] = reason

    def close(self) -> None:
        """Nobody waits for its choices any more. Later calls change nothing."""
        self._is_closed = True
        self._check()

    def told(self, choice: ChoiceKey, history: ChoiceHistory | None) -> None:
        """What the engine says in the end."""
        self._histories[choice] = history
        self._check()

    def timeline(self, explained: Mapping[ChoiceKey, ChoiceHistory]) -> RequestTimeline:
        """As it stands; `explained` says how choices have got on of which the engine has not told the end."""
        histories = {**explained, **self._histories}
        record = self.record
        known = {key: history for key, history in sorted(histories.items(), reverse=True) if history is not None}
        firsts = {prompt: history for (prompt, _), history in known.items()}
        status = (record.stream_error or record.status) if record.is_answered else None
        return RequestTimeline(
            request_id=record.request_id,
            answer_id=record.answer_id or "",
            client=record.client,
            endpoint=record.path,
            model=self._model,
            is_background=record.is_background,
            started_unix=self._started_unix,
            started_at=record.started,
            as_of=time.perf_counter(),
            has_ended=self._has_ended,
            status=status,
            error=record.error,
            prompt_tokens=record.tokens_in or 0,
            cached_tokens=sum(history.cached_tokens for history in firsts.values()),
            output_tokens=record.tokens_out or 0,
            time_to_first_token_s=record.ttft_s,
            work=work_of(known.values()),
            restarts=max((tuple(prompt.restarts) for prompt in self._prompts.values()), key=len, default=()),
            max_tokens=self._max_tokens,
            num_choices=len(self._reasons),
            choices=tuple(
                ChoiceTimeline(*key, self._reasons[key], histories.get(key), tuple(self._prompts[key[0]].restarts))
                for key in self._first
            ),
            trace_context=record.trace_context,
        )

    @property
    def _first(self) -> list[ChoiceKey]:
        return list(self._reasons)[:MOST_CHOICES]

    def _check(self) -> None:
        is_told = self._is_closed and len(self._histories) == len(self._reasons)
        if is_told and self.record.is_answered and not self._has_ended:
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
