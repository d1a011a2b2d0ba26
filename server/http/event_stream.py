"""Server-sent events: a stream begins when there is something to say, stays alive in silence, and says how it ends."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sse_starlette import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.errors import ApiError
from server.http.disconnect import ClientTooSlowError
from server.http.middleware import record_in, report

_Event = TypeVar("_Event")
_Told_co = TypeVar("_Told_co", covariant=True)
_Written_contra = TypeVar("_Written_contra", contravariant=True)


class Source(Protocol[_Told_co]):
    """Where events come from. Alternate `wait` and `take` until `wait` returns False."""

    async def wait(self) -> bool:
        """Return when there may be something to take, or False at the end."""
        ...

    def wake(self) -> None:
        """Have `wait` return."""
        ...

    def take(self) -> Iterator[_Told_co]:
        """What has come. May raise after some of it."""
        ...

    def close(self) -> None:
        """Nobody wants the rest."""
        ...


class Frames(Protocol[_Written_contra]):
    """How events are written, with all line ends; some of it may be empty."""

    @property
    def keep_alive(self) -> bytes:
        """What is sent on a stream that has been silent for long."""
        ...

    def frame(self, event: _Written_contra, /) -> bytes:
        """An event."""
        ...

    def end(self) -> bytes:
        """The end of the stream."""
        ...

    def failure(self, error: ApiError, /) -> bytes:
        """The end of a stream that an error ends."""
        ...


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How long a stream waits for either side."""

    keepalive_s: float
    """Silence after which something is sent nevertheless."""
    send_s: float
    """A client that takes longer to read is given up."""


class EventStream(EventSourceResponse, Generic[_Event]):
    """A response of the library whose loop is our own: all events of a step are one write, and no task or timer is made
    for any of them.

    Nothing is sent before the first event, so that an error before it gets a status of its own; but no longer than a
    proxy would put up with silence. Leaves the source closed.
    """

    def __init__(
        self, source: Source[_Event], frames: Frames[_Event], limits: StreamLimits, headers: Mapping[str, str]
    ) -> None:
        super().__init__(iter(()), ping=0, sep="\n", headers=headers)
        self._source = source
        self._frames = frames
        self._limits = limits
        self._has_begun = False
        self._is_silent = False
        self._is_gone = False
        self._sending_since: float | None = None
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError before the first event, ClientDisconnect, and ClientTooSlowError."""
        self._loop = asyncio.get_running_loop()
        try:
            async with self._watching(receive):
                await self._send_all(scope, send)
        finally:
            self._source.close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        while await self._source.wait():
            if self._is_gone:
                raise ClientDisconnect
            data, error = self._next()
            if error is not None and not (self._has_begun or data):
                raise error
            if data or self._is_silent:
                await self._send(send, data or self._frames.keep_alive)
            if error is not None:
                known = report(error, scope)
                record_in(scope).stream_error = known.status
                await self._send(send, self._frames.failure(known), is_last=True)
                return
        await self._send(send, self._frames.end(), is_last=True)

    def _next(self) -> tuple[bytes, Exception | None]:
        """The frames of what has come, and what went wrong after it."""
        frames: list[bytes] = []
        try:
            for event in self._source.take():
                frames.append(self._frames.frame(event))  # noqa: PERF401  (what came before an error is kept)
        except Exception as error:  # noqa: BLE001  (told to the client, or raised again)
            return b"".join(frames), error
        return b"".join(frames), None

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        self._sending_since = self._last_sent = self._loop.time()
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._sending_since = None
        self._is_silent = False

    @asynccontextmanager
    async def _watching(self, receive: Receive) -> AsyncIterator[None]:
        """Meanwhile, notice when the client leaves, does not read, or has heard nothing for long."""
        task = asyncio.current_task()
        assert task is not None
        self._last_sent = self._loop.time()
        watch = asyncio.create_task(self._watch_client(receive))
        clock = asyncio.create_task(self._watch_clock(task))
        try:
            yield
        except asyncio.CancelledError:
            if self._is_too_slow() and not task.uncancel():
                raise ClientTooSlowError from None
            raise
        finally:
            watch.cancel()
            clock.cancel()

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._source.wake()

    async def _watch_clock(self, task: "asyncio.Task[object]") -> None:
        while True:
            if self._is_too_slow():
                task.cancel()
                return
            silence = self._limits.keepalive_s - (self._loop.time() - self._last_sent)
            if silence <= 0 and self._sending_since is None:
                self._is_silent = True
                self._last_sent = self._loop.time()
                self._source.wake()
            await asyncio.sleep(min(max(silence, self._limits.keepalive_s / 10), self._limits.send_s / 4))

    def _is_too_slow(self) -> bool:
        return self._sending_since is not None and self._loop.time() - self._sending_since > self._limits.send_s
