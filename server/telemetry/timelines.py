"""The requests of late, by their ids."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from server.engine.client import EngineClient
from server.telemetry.live_timeline import LiveTimeline
from server.telemetry.metrics import Metrics
from server.telemetry.request_record import RequestRecord
from server.telemetry.timeline import RequestTimeline

MOST_ENDED: Final = 1000
"""That are remembered, and as many of the background: a batch does not push out what somebody has waited for."""

Followed = LiveTimeline | RequestTimeline
"""A request that has not ended, or one that has."""

Observer = Callable[[RequestTimeline], None]
"""Told of each request that has ended, once. Must not take long: streams wait meanwhile. The log has what it raises."""

_logger = logging.getLogger("samewise.telemetry")


class Timelines:
    """Follows the requests that the engine takes, and remembers the last of them.

    They are found by their client's name and the request's id or the answer's. A client may send several requests with
    one id: the one that the engine took last is found.
    """

    def __init__(self, engine: EngineClient, model: str, observers: Sequence[Observer] = ()) -> None:
        self._engine = engine
        self._model = model
        self._observers = observers
        self._found: dict[tuple[str, str], Followed] = {}
        self._running: dict[LiveTimeline, None] = {}
        """In the order in which the engine took them."""
        self._ended: dict[bool, deque[RequestTimeline]] = {False: deque(), True: deque()}
        """The oldest first; by whether they were in the background."""

    @property
    def num_awaited(self) -> int:
        """Requests that the engine has taken and that have not ended, but for those in the background."""
        return sum(not live.record.is_background for live in self._running)

    def begin(self, record: RequestRecord) -> LiveTimeline:
        """Follow a request, until its timeline ends. It is found once the engine has taken something of it."""
        return LiveTimeline(record, self._model, self._taken, self._end)

    async def find(self, client: str, name: str) -> RequestTimeline | None:
        """The client's request with this id, or with an answer that has it. If it runs, the engine is asked."""
        found = self._found.get((client, name))
        if not isinstance(found, LiveTimeline):
            return found
        prompts = found.asked
        answers = await asyncio.gather(*map(self._engine.explain, prompts.values()))
        pairs = zip(prompts, answers, strict=True)
        return found.timeline({(prompt, one.choice): one for prompt, histories in pairs for one in histories})

    def of_client(self, client: str) -> Sequence[Followed]:
        """The client's requests that run or are remembered, but for those in the background; the oldest first."""
        followed: list[Followed] = [one for one in self._ended[False] if one.client == client]
        followed += [one for one in self._running if one.record.client == client and not one.record.is_background]
        return sorted(followed, key=lambda one: one.started_unix)

    def _taken(self, live: LiveTimeline) -> None:
        self._running[live] = None
        record = live.record
        self._found.update(dict.fromkeys(_keys(record.client, record.request_id, record.answer_id), live))

    def _end(self, live: LiveTimeline) -> None:
        record = live.record
        keys = _keys(record.client, record.request_id, record.answer_id)
        mine = [key for key in keys if self._found.get(key) is live]
        ended = live.timeline({})
        del self._running[live]
        self._found.update(dict.fromkeys(mine, ended))
        line = self._ended[ended.is_background]
        line.append(ended)
        if len(line) > MOST_ENDED:
            oldest = line.popleft()
            for key in _keys(oldest.client, oldest.request_id, oldest.answer_id):
                if self._found.get(key) is oldest:
                    del self._found[key]
        for observer in self._observers:
            try:
                observer(ended)
            except Exception:  # the engine's reader calls this: no request may end for it
                _logger.exception("an observer of ended requests failed", extra=record.ids)


def as_known(followed: Followed) -> RequestTimeline:
    """What is told of a request without asking the engine, which alone knows how those that run get on."""
    return followed.timeline({}) if isinstance(followed, LiveTimeline) else followed


def _keys(client: str, *names: str | None) -> list[tuple[str, str]]:
    return [(client, name) for name in names if name is not None]


def phases_into(metrics: Metrics) -> Observer:
    """Tells the metrics how long requests that somebody has waited for were in which phase."""

    def observe(timeline: RequestTimeline) -> None:
        work = timeline.work
        if work is not None and not timeline.is_background:
            metrics.observe_phases(work.queue_s, work.prefill_s, work.decode_s)

    return observe
