"""Requests for which something has to be done before they can be lined up, such as compiling a grammar."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace

from model_runner.contract import Failure
from scheduler.interface import EngineRequest, FinishReason, RequestOutput

_PATIENCE_S = 0.02
"""For so long nobody looks for new messages while there is nothing else to do."""


class Preparing:
    """Holds them back while others are computed. They arrive when they are ready, so one may pass another."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[EngineRequest, Future[None]]] = {}

    def __len__(self) -> int:
        """How many choices they have."""
        return sum(len(request.choices) for request, _ in self._requests.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: EngineRequest, work: Future[None]) -> None:
        """Hold a request back until this is done."""
        self._requests[request.request_id] = request, work

    def abort(self, request_id: str, choice: int | None) -> None:
        """Want one choice no longer, or all; what is not here is left alone."""
        if request_id not in self._requests:
            return
        request, work = self._requests[request_id]
        left = tuple(one for one in request.choices if choice not in (None, one.index))
        if left:
            self._requests[request_id] = replace(request, choices=left), work
        else:
            del self._requests[request_id]
            work.cancel()

    def take(self, *, is_idle: bool) -> Sequence[tuple[EngineRequest, Failure | None]]:
        """Those that are ready, or can never be; when there is nothing else to do, waits a moment for one."""
        if is_idle:
            wait([work for _, work in self._requests.values()], _PATIENCE_S, FIRST_COMPLETED)
        done = [(request, work) for request, work in self._requests.values() if work.done()]
        for request, _ in done:
            del self._requests[request.request_id]
        return [(request, failure_of(work)) for request, work in done]


def failure_of(work: Future[None]) -> Failure | None:
    """Why the request cannot run, if its preparation, which is done, has found that. Other errors are raised."""
    error = work.exception()
    if isinstance(error, ValueError):
        return Failure(str(error), by_request=True)
    if error is not None:
        raise error
    return None


def failed(request: EngineRequest, failure: Failure) -> list[RequestOutput]:
    """The end of all its choices."""
    return [
        RequestOutput(request.request_id, choice.index, (), finish_reason=FinishReason.ERROR, error=failure)
        for choice in request.choices
    ]
