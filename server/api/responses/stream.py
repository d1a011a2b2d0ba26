"""Streams of responses: live ones, and replays of responses that are generated elsewhere or are stored.

The response is stored before its final event is sent.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Protocol

from starlette.types import Scope

from server.api.openai.errors import DONE
from server.api.responses.objects import ResponseEvent, ResponseStreamError
from server.api.responses.response_builder import ResponseBuilder, response_failure
from server.errors import ApiError
from server.generation.events import Event, Usage
from server.generation.notices import Notice
from server.http.event_stream import Source, ascii_json

KEEP_ALIVE = b'event: keepalive\ndata: {"type":"keepalive"}\n\n'
"""An event of an unknown type, because some clients do not accept a comment as a keep-alive."""
Keep = Callable[[ResponseBuilder, Sequence[bytes]], Awaitable[bool]]
"""Stores an ended response and the frames of its stream, before its last event is sent.

Returns whether that succeeded. If not, it has changed the response, and the last event is written again.
"""
Report = Callable[[Exception], ApiError]
"""Logs an error, and returns the error that clients get, or raises it."""


class ResponseRun(Source[Event], Protocol):
    """The run that generates a response."""

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        ...


class SentFrames:
    """Frames for events that are already encoded."""

    @property
    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def frame(self, event: bytes) -> bytes:
        return event

    def end(self) -> bytes:
        """Return the frame after the last event."""
        return DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that breaks off; its events are not changed."""
        return DONE


class ResponseStream(SentFrames):
    """The live events of a response: both a Source and its Frames.

    An error before the first event is raised; a later one becomes an event.
    """

    def __init__(
        self, run: ResponseRun, builder: ResponseBuilder, keep: Keep, report: Report, max_kept_bytes: float = math.inf
    ) -> None:
        """Frames that take more than `max_kept_bytes` are sent and not kept, and the response has a warning."""
        self._run = run
        self._builder = builder
        self._keep = keep
        self._report = report
        self.frames: list[bytes] = []
        """All frames so far, unless they are not kept. An event's number is its frame's index."""
        self._max_kept_bytes = max_kept_bytes
        self._num_bytes = 0
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
        """The first events, unless they were sent, and a keep-alive: a stream begins even if generation is slow."""
        return b"".join(self._written(self._builder.start())) + KEEP_ALIVE

    def failure(self, error: ApiError) -> bytes:
        return b"".join(self._written(self._builder.fail(error))) + DONE

    def begin(self) -> None:
        """Write the events that announce the response."""
        for _ in self._written(self._builder.begin()):
            pass

    async def cancel(self) -> None:
        """End the response as cancelled, unless it has ended."""
        if self._last is None:
            await self._end(self._builder.cancel())

    async def _end(self, events: Iterator[ResponseEvent]) -> None:
        self._last = list(self._written(events))
        is_cut = 0 < self._max_kept_bytes < self._num_bytes
        if is_cut:
            reason = f"The events are not stored, because they take more than {self._max_kept_bytes} bytes."
            self._builder.warn(Notice("stream", reason))
        if not await self._keep(self._builder, self.frames) or is_cut:
            self._last[-1] = frame(self._builder.end_again())
            if self.frames:
                self.frames[-1] = self._last[-1]

    def _written(self, events: Iterable[ResponseEvent]) -> Iterator[bytes]:
        for event in events:
            written = frame(event)
            self._num_bytes += len(written)
            if self._num_bytes <= self._max_kept_bytes:
                self.frames.append(written)
            else:
                self.frames.clear()
            yield written


class Replayable(Protocol):
    """A response whose frames can be replayed."""

    num_ready: int
    """The number of frames that may be read."""
    has_ended: bool
    followers: "set[EventReplay]"
    """Replays to wake when there are more frames."""

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
    """A replay of a response's frames from an index on, both a Source and its Frames. It does not slow generation."""

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


async def run_to_end(run: ResponseRun, builder: ResponseBuilder) -> None:
    """Generate a whole response that is not streamed. Raises ApiError."""
    while await run.wait():
        for event in run.take():
            for _ in builder.add(event):
                pass
    for _ in builder.end(run.usage):
        pass


def stream_error(error: ApiError, scope: Scope, num_frames: int) -> bytes:
    """Implements StreamErrorWriter: OpenAI's event for errors outside of the response."""
    code = response_failure(error).code
    failure = ResponseStreamError(sequence_number=num_frames, code=code, message=error.message, param=error.param)
    return frame(failure) + DONE


def frame(event: ResponseEvent | ResponseStreamError) -> bytes:
    """Encode an event."""
    return b"event: " + event.type.encode() + b"\ndata: " + ascii_json(event) + b"\n\n"
