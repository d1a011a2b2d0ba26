"""A client's connection, with a time limit on every wait for the client.

uvicorn limits only the idle time between requests. Here a client is also dropped if it sends nothing, sends something
other than HTTP, stops in the middle of a request, or does not read its answer. So it cannot hold a socket, memory or a
request forever, with or without a key. This is the only deadline for slow readers, including readers of streams.
"""

import asyncio
import contextlib
import heapq
import operator
import resource
import secrets
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

import httptools
import msgspec
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from server.http.websocket import IncomingMessages

MAX_HEAD_BYTES = 64 * 1024
"""The largest head of a request. It also limits chunk sizes, extensions and trailers between pieces of a body."""
MAX_PIPELINED = 64
"""The most requests of one connection that wait behind another one. Each costs memory; real clients send fewer."""
_PIECE_BYTES = 16 << 10
"""Bytes parsed at a time. The parser does not stop within a piece."""

_OTHER_FILES = 256
"""Open files that are reserved for everything except clients."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROBE_S = 0.01
"""Seconds between the first two probes of a client that has closed its side of the connection."""


def limited_connection(timeout_s: float, websockets: Mapping[str, int] | None = None) -> type[asyncio.Protocol]:
    """The protocol class of connections that wait at most this long for their client.

    The limit applies to each of these waits: for a request's whole head, for the next bytes of its body, for the rest
    of a body that was answered early, and for the client's reading.

    `websockets` maps the paths of websockets, or prefixes that end with a slash, to the size of their largest message
    (`LimitedWebSocket`). Any other offer to upgrade is ignored, as RFC 9110 allows: the request is served without it.
    """

    class Connection(LimitedConnection):
        client_timeout_s = timeout_s
        max_connections = _max_connections()
        websockets_at = {path.encode(): size for path, size in (websockets or {}).items()}  # noqa: RUF012

    return Connection


class AnsweringConnection:
    """The interface of a connection that DrainingServer needs."""

    @property
    @abstractmethod
    def owes_answer(self) -> bool:
        """Whether a complete request has no complete answer yet, or its client has not read all of it."""


class _HostError(Exception):
    """A request does not name one host; raised through the parser."""


class _FloodError(Exception):
    """A connection has more than MAX_PIPELINED waiting requests; raised through the parser."""


class LimitedConnection(HttpToolsProtocol, AnsweringConnection):
    """uvicorn's connection with a deadline for every wait for the client."""

    client_timeout_s: ClassVar[float]
    max_connections: ClassVar[int]
    websockets_at: ClassVar[Mapping[bytes, int]] = {}
    """Size of the largest message, by path."""
    incoming_messages: "ClassVar[IncomingMessages | None]" = None

    made_at = 0.0
    """Seconds of time.monotonic, which advances within an iteration of the event loop."""
    # The parser calls on_message_begin, on_headers_complete and on_message_complete from within data_received.
    _read_deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None
    _bytes_outside_body = 0  # received since the last request or piece of a body, to within one read
    _body_open = False
    _answered: RequestResponseCycle | None = None  # the current or the last one
    _is_websocket = False  # from then on, another protocol has the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.made_at = time.monotonic()
        self._read_deadline = self._later(self._drop_silent)
        if len(self.connections) > self.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if self._between_requests and self._read_deadline is None:
            self._read_deadline = self._later(self._drop_silent)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self.transport.is_closing() or self._is_websocket:
            return
        if self._body_open and not self.cycle.response_complete:
            self._restart_read_deadline()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._body_open:  # a trailer must not pass for a header, such as an API key
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._cancel_read_deadline()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _FloodError
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):  # as RFC 9112 demands
            raise _HostError
        if not self.parser.should_upgrade():  # `_parse` handles offers to upgrade
            super().on_headers_complete()
            self._body_open = True

    def on_body(self, body: bytes) -> None:
        # Each byte of the body cancels itself and one byte of framing, so many tiny chunks exceed the limit.
        self._bytes_outside_body = max(self._bytes_outside_body - 2 * len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._cancel_read_deadline()
        self._body_open = False
        self._bytes_outside_body = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._limit_closing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self._later(self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_write_deadline()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait for a client that does not read
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_read_deadline()
        self._cancel_write_deadline()
        super().connection_lost(exc)  # notifies the last request, which may wait behind the one being answered
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for an answer that is owed, because the client may have closed its own side only."""
        stays = self.owes_answer and self._is_answering and self.scheme == "http" and self._may_be_probed
        if stays:
            self.cycle.keep_alive = False  # nothing else can come
            self._probe(_PROBE_S)
        return stays

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app if cycle.keep_alive else _with_end(cycle, app))

    @property
    def owes_answer(self) -> bool:
        """Whether a complete request has no complete answer yet, or its client has not read all of it."""
        return (self._is_answering and not self._body_open) or self.transport.get_write_buffer_size() > 0

    @property
    def waits_since(self) -> float | None:
        """When it began to wait for its client to send or to read, on the loop's clock; None while it does not wait."""
        waits = (
            (self._read_deadline, self.client_timeout_s),
            (self._write_deadline, self.client_timeout_s),
            (self.timeout_keep_alive_task, self.timeout_keep_alive),
        )
        return min((deadline.when() - seconds for deadline, seconds in waits if deadline is not None), default=None)

    @property
    def _has_body(self) -> bool:
        """Whether the headers announce a body, whose bytes would be mistaken for websocket frames."""
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        )

    @property
    def _between_requests(self) -> bool:
        """Whether a request's head comes next: nothing is being answered, and no body is awaited."""
        return not self._body_open and not self._is_answering

    @property
    def _is_answering(self) -> bool:
        """Whether a request has no complete answer yet."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _may_be_probed(self) -> bool:
        """Whether it can be found out that the client is gone, or its answer costs too little to matter."""
        scope = self.cycle.scope
        return scope["http_version"] == "1.1" or scope["method"] in ("GET", "HEAD")

    def _probe(self, wait_s: float) -> None:
        """Until the answer begins, send interim responses, more and more rarely: a client that is gone resets."""
        answered = self._answered
        assert answered is not None
        if self.transport.is_closing() or answered.response_started or answered.scope["http_version"] != "1.1":
            return
        self.transport.write(_CONTINUE)
        self.loop.call_later(wait_s, self._probe, 2 * wait_s)

    def _make_room(self) -> None:
        """Drop the connections that have waited longest for their clients; several, because this scans all of them."""
        limited = [one for one in self.connections if isinstance(one, LimitedConnection)]
        waiting = [(since, one.made_at, one) for one in limited if (since := one.waits_since) is not None]
        for _, _, one in heapq.nsmallest(max(1, self.max_connections // 16), waiting, key=operator.itemgetter(0, 1)):
            self.connections.discard(one)  # now, or connections made before it is lost would drop others
            one.transport.abort()

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which stops after the head of a request that offers to upgrade and would skip its body.

        If the offer is declined, a new parser gets the head without the offer, and then the rest.
        """
        whole = memoryview(data)
        unparsed = [whole[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)][::-1]
        while unparsed:
            piece = unparsed.pop()
            self._bytes_outside_body += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, _FloodError):
                    self.transport.abort()
                elif isinstance(error.__context__, _HostError):
                    self._refuse(400, "The request needs exactly one header 'Host'.")
                else:
                    self.send_400_response("Invalid HTTP request received.")
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(501, "CONNECT is not supported: this server is no proxy.")
                    return
                if self._may_become_websocket():
                    self._become_websocket()
                    return
                head = self._head([header for header in self.headers if header[0] != b"upgrade"])
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                unparsed += [rest for rest in (piece[upgrade.args[0] :], memoryview(head)) if rest]
            if self._bytes_outside_body > MAX_HEAD_BYTES:
                self._refuse(431, "The request's header fields are too large.")
                return

    def _head(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The head of the request that was parsed last, with these headers."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        return b"\r\n".join([*lines, *(b"%b: %b" % header for header in headers), b"", b""])

    def _may_become_websocket(self) -> bool:
        """Whether the request may become a websocket; never during an answer, which would lose its connection."""
        return (
            self._max_message_bytes is not None
            and self._get_upgrade() == b"websocket"
            and self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and not self._has_body
            and not self._is_answering
        )

    @property
    def _max_message_bytes(self) -> int | None:
        """The largest message of a websocket at the last request's path; None if there is none."""
        path = self.url.partition(b"?")[0]
        for at, size in self.websockets_at.items():
            if path == at or (at.endswith(b"/") and path.startswith(at)):
                return size
        return None

    def _become_websocket(self) -> None:
        from server.http.websocket import LimitedWebSocket  # noqa: PLC0415  (slow, and rarely needed)

        size = self._max_message_bytes
        assert size is not None
        websocket = LimitedWebSocket(
            self.config, self.server_state, self.app_state, self.client_timeout_s, size, self._all_incoming()
        )
        if not websocket.understands(self._head(self.headers)):
            self._refuse(400, "The request is not a valid WebSocket handshake.")
            return
        self._is_websocket = True
        self._cancel_write_deadline()
        self.connections.discard(self)
        self.transport.set_protocol(websocket)
        websocket.connection_made(self.transport)

    @classmethod
    def _all_incoming(cls) -> "IncomingMessages":
        """The unfinished messages of all websockets of this server."""
        from server.http.body import MAX_INCOMPLETE_MIB  # noqa: PLC0415
        from server.http.websocket import IncomingMessages  # noqa: PLC0415

        if cls.incoming_messages is None:
            most = max(int(MAX_INCOMPLETE_MIB * (1 << 20)), *(4 * size for size in cls.websockets_at.values()))
            cls.incoming_messages = IncomingMessages.within(most)
        return cls.incoming_messages

    def _later(self, action: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(self.client_timeout_s, action)

    def _drop_silent(self) -> None:
        self._read_deadline = None
        if self._body_open and self.flow.read_paused:
            self._restart_read_deadline()  # the application is slow, not the client
        elif self._body_open or self._between_requests:
            self.transport.abort()

    def _restart_read_deadline(self) -> None:
        self._cancel_read_deadline()
        self._read_deadline = self._later(self._drop_silent)

    def _cancel_read_deadline(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None

    def _cancel_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _limit_closing(self) -> None:
        """Limit the time that a closing transport waits for its client to read, which asyncio does not."""
        if self._write_deadline is None:
            self._write_deadline = self._later(self.transport.abort)

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, unless another answer has begun, and close the connection."""
        if self._between_requests or not (self.cycle.response_started or self.pipeline):
            self._write_error(status, message)
        self._cancel_read_deadline()
        self.transport.close()
        self._limit_closing()

    def _write_error(self, status: int, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
            f"x-request-id: {new_request_id()}\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[status] + head.encode() + body)


def _with_end(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """The application for a connection that ends with the answer: a single header says so.

    HTTP/1.0 has no chunks, so there the end of the connection is the end of a body of unknown size.
    """
    is_old = cycle.scope["http_version"] == "1.0"

    async def run(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        is_unsized = False

        async def send_last(message: ASGISendEvent) -> None:
            nonlocal is_unsized
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                message["headers"] = [pair for pair in headers if pair[0].lower() != b"connection"]
                is_unsized = is_old and not any(name.lower() == b"content-length" for name, _ in headers)
                cycle.chunked_encoding = False if is_unsized else None
            elif message["type"] == "http.response.body" and is_unsized:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_last)

    return run


def new_request_id() -> str:
    """A new, unique id for a request."""
    return f"req_{secrets.token_hex(16)}"


def _max_connections() -> int:
    """The most connections that the hard limit of open files allows; raises the soft limit to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems have a lower limit that they do not report
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft - min(_OTHER_FILES, soft // 2)
