"""Streams of responses: of one as it is made, and of one that is made elsewhere or was made before.

Whatever has to be stored is stored before the last event says that the response has ended.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Protocol

from starlette.types import Scope

from server.api.openai.errors import DONE
from server.api.responses.objects import ResponseEvent, ResponseStreamError
from server.api.responses.response_builder import ResponseBuilder, response_failure
from server.errors import ApiError
from server.generation.events import Event, Usage
from server.http.event_stream import Source, ascii_json

KEEP_ALIVE = b'event: keepalive\ndata: {"type":"keepalive"}\n\n'
"""An event of an unknown type: some clients do not take a comment for a sign of life."""
Keep = Callable[[ResponseBuilder, Sequence[bytes]], Awaitable[bool]]
"""Stores a response that has ended and the frames of its stream, before its last event is sent.

Returns whether it is stored like that; if not, the response was changed, and its last event is written again.
"""
Report = Callable[[Exception], ApiError]
"""Notes an error for those who run the server; returns it as clients may see it, or raises it."""


class Making(Source[Event], Protocol):
    """The run that makes a response."""

    @property
    def usage(self) -> Usage:
        """The tokens that it took so far."""
        ...


class SentFrames:
    """Frames of events that are written already."""

    @property
    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def frame(self, event: bytes) -> bytes:
        return event

    def end(self) -> bytes:
        """Return the frame after the last event."""
        return DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that cannot go on; its events stay as they are."""
        return DONE


class ResponseStream(SentFrames):
    """The events of a response as they are made: both a Source and its Frames.

    An error before the first event is raised; a later one becomes an event.
    """

    def __init__(self, run: Making, builder: ResponseBuilder, keep: Keep, report: Report) -> None:
        self._run = run
        self._builder = builder
        self._keep = keep
        self._report = report
        self.frames: list[bytes] = []
        """All of them so far: the number of each is its place."""
        self._error: ApiError | None = None
        self._last: list[bytes] | None = None
        self._is_over = False

    async def wait(self) -> bool:
        if self._is_over:
            return False
        if self._error is not None:
            await self._end(self._builder.fail(self._error))
        elif not await self._run.wait():
            await self._end(self._builder.end(self._run.usage))
        return True

    def wake(self) -> None:
        self._run.wake()

    def take(self) -> Iterator[bytes]:
        if self._last is not None:
            self._is_over = True
            yield from self._last
            return
        try:
            for event in self._run.take():
                yield from self._written(self._builder.add(event))
        except Exception as error:
            if not self._builder.has_begun:
                raise
            self._error = self._report(error)

    def close(self) -> None:
        self._run.close()

    @property
    def keep_alive(self) -> bytes:
        """The beginning, if it was not sent yet, and a sign of life, however long the first event takes."""
        return b"".join(self._written(self._builder.start())) + KEEP_ALIVE

    def failure(self, error: ApiError) -> bytes:
        return b"".join(self._written(self._builder.fail(error))) + DONE

    def begin(self) -> None:
        """Write the events that announce the response."""
        for _ in self._written(self._builder.begin()):
            pass

    async def cancel(self) -> None:
        """End it here, unless it has ended."""
        if self._last is None:
            await self._end(self._builder.cancel())

    async def _end(self, events: Iterator[ResponseEvent]) -> None:
        self._last = list(self._written(events))
        if not await self._keep(self._builder, self.frames):
            self._last[-1] = self.frames[-1] = frame(self._builder.end_again())

    def _written(self, events: Iterable[ResponseEvent]) -> Iterator[bytes]:
        for event in events:
            written = frame(event)
            self.frames.append(written)
            yield written


class Replayable(Protocol):
    """A response whose frames others may read."""

    num_ready: int
    """How many of the frames may be read."""
    has_ended: bool
    followers: "set[EventReplay]"
    """Replays to be woken when there are more."""

    @property
    def frames(self) -> Sequence[bytes]:
        """All frames so far."""
        ...


class StoredFrames:
    """All frames of a response that has ended."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self.frames = frames
        self.num_ready = len(frames)
        self.has_ended = True
        self.followers: set[EventReplay] = set()


class EventReplay(SentFrames):
    """The frames of a response from one of them on, both a Source and its Frames. It does not disturb their maker."""

    def __init__(self, replayed: Replayable, start: int) -> None:
        self._replayed = replayed
        self._place = start
        self._woken = asyncio.Event()
        replayed.followers.add(self)

    async def wait(self) -> bool:
        if self._place >= self._replayed.num_ready:
            if self._replayed.has_ended:
                return False
            await self._woken.wait()
        self._woken.clear()
        return True

    def wake(self) -> None:
        self._woken.set()

    def take(self) -> Iterator[bytes]:
        end = self._replayed.num_ready
        yield from self._replayed.frames[self._place : end]
        self._place = max(self._place, end)

    def close(self) -> None:
        self._replayed.followers.discard(self)


async def run_out(run: Making, builder: ResponseBuilder) -> None:
    """Make all of a response that is not streamed. Raises ApiError."""
    while await run.wait():
        for event in run.take():
            for _ in builder.add(event):
                pass
    for _ in builder.end(run.usage):
        pass


def stream_error(error: ApiError, scope: Scope, num_frames: int) -> bytes:
    """OpenAI's event for errors that are not the response's: a StreamErrorWriter."""
    code = response_failure(error).code
    failure = ResponseStreamError(sequence_number=num_frames, code=code, message=error.message, param=error.param)
    return frame(failure) + DONE


def frame(event: ResponseEvent | ResponseStreamError) -> bytes:
    """An event as it is sent."""
    return b"event: " + event.type.encode() + b"\ndata: " + ascii_json(event) + b"\n\n"
