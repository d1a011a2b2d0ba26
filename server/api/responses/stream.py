"""Streams of responses: live ones, and replays of responses that are generated elsewhere or are stored.

The response is stored before its final event is sent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Protocol

from starlette.types import Scope

from server.api.openai.errors import DONE
from server.api.responses.objects import ResponseEvent, ResponseStreamError
from server.api.responses.response_builder import ResponseBuilder, response_failure
from server.errors import ApiError, InvalidRequestError
from server.generation.events import Event, Usage
from server.generation.notices import Notice
from server.generation.planning.limits import MAX_ANSWER_MIB
from server.http.event_stream import Source, ascii_json
from server.http.fair_memory import FairMemory

KEEP_ALIVE = b'event: keepalive\ndata: {"type":"keepalive"}\n\n'
"""An event of an unknown type, because some clients do not accept a comment as a keep-alive."""
MAX_KEPT_BYTES = MAX_ANSWER_MIB << 20
"""Most bytes of a response's events that are kept to be sent again."""
MAX_LIVE_BYTES = 4 * MAX_KEPT_BYTES
"""Most bytes of the events of all running responses."""
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


class ResponseStream(SentFrames):
    """The live events of a response: both a Source and its Frames.

    An error before the first event is raised; a later one becomes an event.
    """

    def __init__(
        self, run: ResponseRun, builder: ResponseBuilder, keep: Keep, report: Report, frames: "LiveFrames"
    ) -> None:
        """All frames that are sent are added to `frames`. If they are not kept, the response has a warning."""
        self._run = run
        self._builder = builder
        self._keep = keep
        self._report = report
        self._frames = frames
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
            self._frames.publish()
            return
        try:
            for event in self._run.take():
                yield from self._written(self._builder.add(event))
        except Exception as error:
            if not self._builder.has_begun:
                raise
            self._error = self._report(error)
        self._frames.publish()

    def close(self) -> None:
        self._run.close()
        self._frames.end()

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
        self._frames.publish()

    async def cancel(self) -> None:
        """End the response as cancelled, unless it has ended."""
        if self._last is None:
            await self._end(self._builder.cancel())

    async def _end(self, events: Iterator[ResponseEvent]) -> None:
        async with self._frames.ending:
            if self._last is not None:  # it was cancelled, or ended, meanwhile
                return
            self._last = list(self._written(events))
            await asyncio.sleep(0)
        kept = self._frames.complete()
        if reason := self._frames.cut_because:
            self._builder.warn(Notice("stream", f"The events are not stored, because {reason}."))
        if not await self._keep(self._builder, kept) or reason:
            self._last[-1] = frame(self._builder.end_again())
            self._frames.replace_last(self._last[-1])

    def _written(self, events: Iterable[ResponseEvent]) -> Iterator[bytes]:
        for event in events:
            written = frame(event)
            self._frames.add(written)
            yield written


class Replayable(Protocol):
    """A response whose frames can be replayed. An event's number is its frame's index."""

    @property
    def frames(self) -> Sequence[bytes]:
        """Frames that can be read, from number `first` on."""
        ...

    first: int
    """The number of frames before `frames`, which were not kept."""
    num_ready: int
    """The number of frames that may be read, with those that were not kept."""
    has_ended: bool
    followers: "set[EventReplay]"
    """Replays to wake when there are more frames."""


class StoredFrames:
    """All frames of a response that has ended."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self.frames = frames
        self.first = 0
        self.num_ready = len(frames)
        self.has_ended = True
        self.followers: set[EventReplay] = set()


class RunningResponses:
    """The memory for the events of all running responses, and their turns to end."""

    def __init__(self, max_bytes: int = MAX_LIVE_BYTES) -> None:
        self.memory = FairMemory(max_bytes, LiveFrames.drop)
        """Counts the events of all."""
        self.ending = asyncio.Lock()
        """One ends at a time: if many end in the same step, other requests have a turn in between."""


class LiveFrames:
    """The frames of a running response, which are Replayable.

    If they take too much memory, they are not kept: then there are only those that a follower has still to read.
    """

    def __init__(self, client: str, running: RunningResponses, max_bytes: int) -> None:
        """With a `max_bytes` of 0, frames are not to be kept."""
        self.frames: list[bytes] = []
        self.first = 0
        self.num_ready = 0
        self.has_ended = False
        self.followers: set[EventReplay] = set()
        self.cut_because = ""
        """Why the frames are not kept, if they were to be."""
        self._client = client
        self.ending = running.ending
        self._memory = running.memory
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._is_kept = max_bytes > 0

    def add(self, frame: bytes) -> None:
        """Add a frame, which followers may read after `publish`."""
        if not (self._is_kept or self.followers):
            self.first += 1
            return
        self.frames.append(frame)
        self._num_bytes += len(frame)
        if self._num_bytes > self._max_bytes:
            self._cut(f"they take more than {self._max_bytes} bytes")
        self._memory.resize(self, self._client, self._num_bytes)

    def drop(self) -> None:
        """Keep no frames, because all running responses' take too much memory."""
        self._cut("the events of your running responses take too much memory")

    def publish(self) -> None:
        """Let followers read what was added. They run before the next frames are added, unless they are slow."""
        if not self._is_kept:
            self._forget(min((one.place for one in self.followers), default=self.first + len(self.frames)))
            self._memory.resize(self, self._client, self._num_bytes)
        self.num_ready = self.first + len(self.frames)
        self._wake()

    def complete(self) -> Sequence[bytes]:
        """All frames, or none if they are not kept. They are not dropped any more."""
        self._memory.resize(self, self._client, 0)
        return tuple(self.frames) if self._is_kept else ()

    def replace_last(self, frame: bytes) -> None:
        """Replace a frame that was added and not published, if it is there."""
        if self.frames:
            self.frames[-1] = frame

    def end(self) -> None:
        """No more frames come."""
        self.has_ended = True
        self._memory.resize(self, self._client, 0)
        self._wake()

    def _cut(self, reason: str) -> None:
        if self._is_kept:
            self._is_kept, self.cut_because = False, reason
        self._forget(self.num_ready if self.followers else self.first + len(self.frames))

    def _forget(self, end: int) -> None:
        """Forget the frames before this one."""
        forgotten = self.frames[: max(0, end - self.first)]
        del self.frames[: len(forgotten)]
        self.first += len(forgotten)
        self._num_bytes -= sum(map(len, forgotten))

    def _wake(self) -> None:
        for follower in self.followers:
            follower.wake()


class EventReplay(SentFrames):
    """A replay of a response's frames from an index on, both a Source and its Frames. It does not slow generation."""

    def __init__(self, replayed: Replayable, start: int) -> None:
        self.place = start
        """The index of the next frame."""
        self._replayed = replayed
        self._woken = asyncio.Event()
        replayed.followers.add(self)

    async def wait(self) -> bool:
        if self.place >= self._replayed.num_ready:
            if self._replayed.has_ended:
                return False
            await self._woken.wait()
        self._woken.clear()
        return True

    def wake(self) -> None:
        self._woken.set()

    def take(self) -> Iterator[bytes]:
        first, end = self._replayed.first, self._replayed.num_ready
        if self.place < first and self.place < end:
            raise InvalidRequestError(
                f"Event {self.place} of this response is not kept any more, because its events take too much memory. "
                "Retrieve the response without 'stream'.",
                param="starting_after",
                code="invalid_value",
            )
        yield from self._replayed.frames[max(0, self.place - first) : max(0, end - first)]
        self.place = max(self.place, end)

    def failure(self, error: ApiError) -> bytes:
        return stream_error(error, {}, self.place)

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
