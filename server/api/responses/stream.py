"""From a run to the events of its response. What has to be kept is, before the last event says that it is."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Protocol

from starlette.types import Scope

from server.api.openai.errors import DONE
from server.api.responses.output import Told
from server.api.responses.telling import Telling, failure_of
from server.errors import ApiError
from server.generation.events import Event, Usage
from server.http.ascii_json import ascii_json
from server.http.event_stream import Source

KEEP_ALIVE = b'event: keepalive\ndata: {"type":"keepalive"}\n\n'
"""An event of a type that nobody knows: some clients do not take a comment for a sign of life."""
Keep = Callable[[Telling, Sequence[bytes]], Awaitable[bool]]
"""Awaited when all is known and nobody was told: gets the response, and the frames of its stream.

Returns whether it is kept like that; if not, it has told the response so, whose last event is written anew.
"""
Report = Callable[[Exception], ApiError]
"""Notes an error for those who run the server; returns it as clients may see it, or raises it."""


class Making(Source[Event], Protocol):
    """What makes the answer."""

    @property
    def usage(self) -> Usage:
        """What it took so far."""
        ...


class SentFrames:
    """Frames of events that are written already."""

    @property
    def keep_alive(self) -> bytes:
        """See Frames."""
        return KEEP_ALIVE

    def frame(self, event: bytes) -> bytes:
        """See Frames."""
        return event

    def end(self) -> bytes:
        """Return what follows the last event."""
        return DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that cannot go on; its events stay as they are."""
        return DONE


class ResponseStream(SentFrames):
    """The events of a response, as they are sent: both a Source and its Frames.

    An error before the first event is raised, a later one is told.
    """

    def __init__(self, run: Making, telling: Telling, keep: Keep, report: Report) -> None:
        self._run = run
        self._telling = telling
        self._keep = keep
        self._report = report
        self.frames: list[bytes] = []
        """All of them so far: the number of each is its place."""
        self._error: ApiError | None = None
        self._last: list[bytes] | None = None
        self._is_over = False

    async def wait(self) -> bool:
        """See Source."""
        if self._is_over:
            return False
        if self._error is not None:
            await self._end(self._telling.fail(self._error))
        elif not await self._run.wait():
            await self._end(self._telling.end(self._run.usage))
        return True

    def wake(self) -> None:
        """See Source."""
        self._run.wake()

    def take(self) -> Iterator[bytes]:
        """See Source."""
        if self._last is not None:
            self._is_over = True
            yield from self._last
            return
        try:
            for event in self._run.take():
                yield from self._written(self._telling.add(event))
        except Exception as error:
            if not self._telling.has_begun:
                raise
            self._error = self._report(error)

    def close(self) -> None:
        """See Source."""
        self._run.close()

    @property
    def keep_alive(self) -> bytes:
        """See Frames. A stream begins as it should, however long its first event takes."""
        return b"".join(self._written(self._telling.start())) + KEEP_ALIVE

    def failure(self, error: ApiError) -> bytes:
        """See Frames."""
        return b"".join(self._written(self._telling.fail(error))) + DONE

    def begin(self) -> None:
        """Tell that there is a response."""
        for _ in self._written(self._telling.begin()):
            pass

    async def cancel(self) -> None:
        """There is no more of it; what has ended stays as it is."""
        if self._last is None:
            await self._end(self._telling.cancel())

    async def _end(self, events: Iterator[Told]) -> None:
        self._last = list(self._written(events))
        if not await self._keep(self._telling, self.frames):
            self._last[-1] = self.frames[-1] = frame(self._telling.end_anew())

    def _written(self, events: Iterable[Told]) -> Iterator[bytes]:
        for event in events:
            written = frame(event)
            self.frames.append(written)
            yield written


def stream_error(error: ApiError, scope: Scope, num_frames: int) -> bytes:
    """See StreamErrorWriter: OpenAI's event for errors that are not the response's."""
    failure = {"code": failure_of(error)["code"], "message": error.message, "param": error.param}
    return frame({"type": "error", "sequence_number": num_frames, **failure}) + DONE


def frame(event: Told) -> bytes:
    """An event as it is sent."""
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + ascii_json(event) + b"\n\n"


async def run_out(run: Making, telling: Telling) -> None:
    """Make all of an answer of which nobody is told meanwhile. Raises ApiError."""
    while await run.wait():
        for event in run.take():
            for _ in telling.add(event):
                pass
    for _ in telling.end(run.usage):
        pass
