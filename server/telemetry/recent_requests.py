"""RecentRequests: finds the traces of running and recently ended requests by their ids."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from server.engine.client import EngineClient
from server.telemetry.metrics import Metrics
from server.telemetry.request_trace import GenerationTrace, RequestTrace
from server.telemetry.timeline import RequestTimeline

MAX_ENDED: Final = 1000
"""Ended requests kept, and the same number of background ones, so that a batch does not evict interactive requests."""

Traced = GenerationTrace | RequestTimeline
"""A running or an ended request."""

Observer = Callable[[RequestTimeline], None]
"""Called once for each ended request. It must be quick, because streams wait for it; its exceptions are logged."""

_logger = logging.getLogger("samewise.telemetry")


class RecentRequests:
    """The requests that the engine took: those that run, and the last that ended.

    A request is found by its client's name and its own id or its answer's. If a client sends several requests with one
    id, the one that the engine took last is found.
    """

    def __init__(self, engine: EngineClient, model: str, metrics: Metrics, observers: Sequence[Observer] = ()) -> None:
        self._engine = engine
        self._model = model
        self._metrics = metrics
        self._observers = observers
        self._found: dict[tuple[str, str], Traced] = {}
        self._running: dict[GenerationTrace, None] = {}
        """In the order in which the engine took them."""
        self._ended: dict[bool, deque[RequestTimeline]] = {False: deque(), True: deque()}
        """Oldest first, by `is_background`."""

    @property
    def num_awaited(self) -> int:
        """Running requests, not counting background ones."""
        return sum(not trace.request.is_background for trace in self._running)

    def begin(self, request: RequestTrace) -> GenerationTrace:
        """Start to trace a request's generation. It is found once the engine has taken its first prompt."""
        return GenerationTrace(request, self._model, self._metrics, self._taken, self._end)

    async def find(self, client: str, name: str) -> RequestTimeline | None:
        """The client's request with this request id or answer id, or None. Asks the engine about one that runs."""
        found = self._found.get((client, name))
        if not isinstance(found, GenerationTrace):
            return found
        prompts = found.unreported
        answers = await asyncio.gather(*map(self._engine.explain, prompts.values()))
        pairs = zip(prompts, answers, strict=True)
        return found.timeline({(prompt, one.choice): one for prompt, histories in pairs for one in histories})

    def of_client(self, client: str) -> Sequence[Traced]:
        """The client's interactive requests, oldest first."""
        traced: list[Traced] = [one for one in self._ended[False] if one.client == client]
        traced += [one for one in self._running if one.request.client == client and not one.request.is_background]
        return sorted(traced, key=lambda one: one.started_unix)

    def _taken(self, trace: GenerationTrace) -> None:
        self._running[trace] = None
        self._found.update(dict.fromkeys(_keys(trace.request), trace))

    def _end(self, trace: GenerationTrace) -> None:
        mine = [key for key in _keys(trace.request) if self._found.get(key) is trace]
        ended = trace.timeline({})
        del self._running[trace]
        self._found.update(dict.fromkeys(mine, ended))
        self._keep(ended)
        work = ended.work
        if work is not None and not ended.is_background:
            self._metrics.observe_phases(work.queue_s, work.prefill_s, work.decode_s)
        for observer in self._observers:
            try:
                observer(ended)
            except Exception:  # the engine's reader thread must survive it
                _logger.exception("an observer of ended requests failed", extra=trace.request.ids)

    def _keep(self, ended: RequestTimeline) -> None:
        kept = self._ended[ended.is_background]
        kept.append(ended)
        if len(kept) > MAX_ENDED:
            oldest = kept.popleft()
            for key in _keys(oldest):
                if self._found.get(key) is oldest:
                    del self._found[key]


def timeline_of(traced: Traced) -> RequestTimeline:
    """The timeline as far as the server knows it. Only the engine knows the state of requests that run."""
    return traced.timeline({}) if isinstance(traced, GenerationTrace) else traced


def _keys(request: RequestTrace | RequestTimeline) -> list[tuple[str, str]]:
    return [(request.client, name) for name in (request.request_id, request.answer_id) if name]
