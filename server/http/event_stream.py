"""Server-sent events: streams that start with their first event, are kept alive, and end with a status."""

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

EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
"""A stream with a JSON object a line."""
_Event = TypeVar("_Event")
_Item_co = TypeVar("_Item_co", covariant=True)
_Item_contra = TypeVar("_Item_contra", contravariant=True)


class Source(Protocol[_Item_co]):
    """A source of events. Alternate `wait` and `take` until `wait` returns False."""

    async def wait(self) -> bool:
        """Return True when there may be events to take, or False at the end."""
        ...

    def wake(self) -> None:
        """Make `wait` return."""
        ...

    def take(self) -> Iterator[_Item_co]:
        """Yield the events that are ready. May raise after some of them."""
        ...

    def close(self) -> None:
        """Stop: no more events will be taken."""
        ...


class Frames(Protocol[_Item_contra]):
    """The bytes of a stream, with all line ends. Any of them may be empty."""

    @property
    def keep_alive(self) -> bytes:
        """Sent when a stream has been silent for long."""
        ...

    def frame(self, event: _Item_contra, /) -> bytes:
        """Encode an event."""
        ...

    def end(self) -> bytes:
        """The end of the stream."""
        ...

    def failure(self, error: ApiError, /) -> bytes:
        """The end of a stream that fails."""
        ...


class EventStream(EventSourceResponse, Generic[_Event]):
    """Streams a source's events: all events of a step in one write, and a keep-alive after `keepalive_s` of silence.

    The library makes the headers. `__call__` is our own for two reasons. The library's sends the status before the
    first event, so an error before that event could not have its own status; and it runs four tasks for each stream.
    """

    def __init__(
        self,
        source: Source[_Event],
        frames: Frames[_Event],
        keepalive_s: float,
        headers: Mapping[str, str],
        media_type: str = EVENT_STREAM,
    ) -> None:
        super().__init__(iter(()), ping=0, sep="\n", headers={"content-type": media_type, **headers})
        del self.headers["connection"]  # whether it stays open is the connection's matter
        self._source = source
        self._frames = frames
        self._keepalive_s = keepalive_s
        self._has_begun = False
        self._is_silent = False
        self._is_gone = False
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream and close the source. Raises ApiError before the first event, and ClientDisconnect."""
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
        """Wake the source when the client has disconnected, or the stream has been silent for long."""
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
    """The value as JSON in ASCII, because some readers of events treat U+2028 and the like as line ends."""
    encoded = msgspec.json.encode(value)
    return encoded if encoded.isascii() else encoded.decode().encode("ascii", _ESCAPED)


def _escape(error: UnicodeError) -> tuple[str, int]:
    """Escape characters for JSON. All of them are in strings, because JSON has them nowhere else."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be").hex(" ", 2)
    return "\\u" + units.replace(" ", "\\u"), error.end


codecs.register_error(_ESCAPED, _escape)
