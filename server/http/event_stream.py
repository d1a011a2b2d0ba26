"""Server-sent events: a stream begins when there is something to say, stays alive in silence, and says how it ends."""

import asyncio
import codecs
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec
from sse_starlette import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.errors import ApiError
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


class EventStream(EventSourceResponse, Generic[_Event]):
    """Streams what a source has: all events of a step in one write, and a sign of life after `keepalive_s` of silence.

    The library makes the headers; `__call__` is our own because the library's sends the status before there is an
    event, so that an error before the first one could not have its own status, and runs four tasks for each stream.
    """

    def __init__(
        self, source: Source[_Event], frames: Frames[_Event], keepalive_s: float, headers: Mapping[str, str]
    ) -> None:
        super().__init__(iter(()), ping=0, sep="\n", headers=headers)
        self._source = source
        self._frames = frames
        self._keepalive_s = keepalive_s
        self._has_begun = False
        self._is_silent = False
        self._is_gone = False
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream and closes the source. Raises ApiError before the first event, and ClientDisconnect."""
        self._loop = asyncio.get_running_loop()
        self._last_sent = self._loop.time()
        watch = asyncio.create_task(self._watch(receive))
        try:
            await self._send_all(scope, send)
        finally:
            watch.cancel()
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
        """The frames of the events that are ready, and the error that came after them."""
        frames: list[bytes] = []
        try:
            for event in self._source.take():
                frames.append(self._frames.frame(event))  # noqa: PERF401  (events before an error are kept)
        except Exception as error:  # noqa: BLE001  (sent to the client, or raised again)
            return b"".join(frames), error
        return b"".join(frames), None

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        self._last_sent = self._loop.time()
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._is_silent = False

    async def _watch(self, receive: Receive) -> None:
        """Wakes the source when the client has left, or the stream has been silent for long."""
        while not self._is_gone:
            try:
                async with asyncio.timeout_at(self._last_sent + self._keepalive_s):
                    self._is_gone = (await receive())["type"] == "http.disconnect"
            except TimeoutError:
                now = self._loop.time()
                if now < self._last_sent + self._keepalive_s:
                    continue  # something was sent meanwhile
                self._is_silent, self._last_sent = True, now
            self._source.wake()


_ESCAPED = "samewise.json"


def ascii_json(value: object) -> bytes:
    """The value in one line. Some readers of events take U+2028 and its like for the end of one."""
    encoded = msgspec.json.encode(value)
    return encoded if encoded.isascii() else encoded.decode().encode("ascii", _ESCAPED)


def _escape(error: UnicodeError) -> tuple[str, int]:
    """The characters as JSON escapes them: they are in strings, where alone JSON has such characters."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be").hex(" ", 2)
    return "\\u" + units.replace(" ", "\\u"), error.end


codecs.register_error(_ESCAPED, _escape)
