"""Requests for which something has to be done before they can be lined up, such as compiling a grammar."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

from model_runner.contract import Failure
from scheduler.history import ChoiceHistory, Progress
from scheduler.interface import BACKGROUND, ChoiceState, EngineRequest, RequestOutput
from scheduler.output import failure_of

_PATIENCE_S = 0.02
"""For so long nobody looks for new messages while there is nothing else to do."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request for which all was done that could be."""

    request: EngineRequest
    arrived_at: float
    failure: Failure | None
    """Why it cannot run, if it cannot."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A request with what is done for it."""

    request: EngineRequest
    work: Future[None]
    arrived_at: float


class Preparing:
    """Holds them back while others are computed. They arrive when they are ready, so one may pass another."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}  # by request id

    def __len__(self) -> int:
        """How many choices they have."""
        return sum(len(held.request.choices) for held in self._held.values())

    @property
    def num_background(self) -> int:
        """Those that only get the room that others leave."""
        return sum(len(held.request.choices) for held in self._held.values() if held.request.tier >= BACKGROUND)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def add(self, request: EngineRequest, work: Future[None], now: float) -> None:
        """Hold a request back until this is done."""
        self._held[request.request_id] = _Held(request, work, now)

    def abort(self, request_id: str, choice: int | None, now: float) -> list[ChoiceHistory]:
        """Want one choice no longer, or all; what is not here is left alone."""
        held = self._held.get(request_id)
        if held is None:
            return []
        left = tuple(one for one in held.request.choices if choice not in (None, one.index))
        if left:
            self._held[request_id] = replace(held, request=replace(held.request, choices=left))
        else:
            del self._held[request_id]
            held.work.cancel()
        aborted = [one for one in held.request.choices if one not in left]
        return [_history(held.request, one, held.arrived_at, now, has_ended=True) for one in aborted]

    def explain(self, request_id: str, now: float) -> list[ChoiceHistory]:
        """Of the choices that are wanted."""
        held = self._held.get(request_id)
        if held is None:
            return []
        return [_history(held.request, choice, held.arrived_at, now) for choice in held.request.choices]

    def take(self, *, is_idle: bool) -> Sequence[Prepared]:
        """Those that are ready, or can never be; when there is nothing else to do, waits a moment for one."""
        if is_idle:
            wait([held.work for held in self._held.values()], _PATIENCE_S, FIRST_COMPLETED)
        done = [held for held in self._held.values() if held.work.done()]
        for held in done:
            del self._held[held.request.request_id]
        return [Prepared(held.request, held.arrived_at, _failure_of(held.work)) for held in done]


def failed(request: EngineRequest, failure: Failure, arrived_at: float, now: float) -> list[RequestOutput]:
    """The end of all its choices."""
    histories = [_history(request, choice, arrived_at, now, has_ended=True) for choice in request.choices]
    return [failure_of(history, request.request_id, failure) for history in histories]


def _history(
    request: EngineRequest, choice: ChoiceState, arrived_at: float, now: float, *, has_ended: bool = False
) -> ChoiceHistory:
    """Of a choice that never got into the queue."""
    progress = Progress(arrived_at, len(request.prompt), len(choice.output))
    return progress.history(choice.index, len(choice.output), now, has_ended=has_ended)


def _failure_of(work: Future[None]) -> Failure | None:
    """Why the request cannot run, if its preparation, which is done, has found that. Other errors are raised."""
    error = work.exception()
    if isinstance(error, ValueError):
        return Failure(str(error), by_request=True)
    if error is not None:
        raise error
    return None
