"""Restricts NiceGUI to what the page needs, because NiceGUI itself does not check keys.

`WebsocketGuard` decides who may open a websocket, `BrowserPacket` what may be sent, and `harden` configures NiceGUI.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs
from weakref import WeakKeyDictionary

import msgspec
from nicegui import Client, core, json
from nicegui.javascript_request import JavaScriptRequest
from socketio import packet
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.page.throttle import VisitorQueue, origin_of

_READ_S = 20.0
"""A browser that takes longer to read a message must reconnect."""
_ID = re.compile("[0-9a-f-]{36}")
_QUERY = {
    "client_id": _ID,
    "document_id": _ID,
    "tab_id": _ID,
    "old_tab_id": re.compile("null|" + _ID.pattern),
    "next_message_id": re.compile("[0-9]{1,9}"),
}
"""Query parameters of a websocket that NiceGUI reads, with the form in which browsers send them."""
_SPOKEN = re.compile("4[012]")
"""Engine.IO messages that browsers send: Socket.IO's connect, disconnect and event."""
_PING, _PONG, _CLOSE = "2", "3", "1"
_MOST_STRUCTURED = 1 << 16
"""Maximum characters of an argument that is not a string, because lists and objects are slowest to parse."""
_LOGGED_EVERY_S = 60.0
_MOST_ARGUMENTS = 16
_ACKNOWLEDGED = re.compile("[0-9]{0,9}")

_Id = Annotated[str, msgspec.Meta(max_length=36)]


class _Handshake(msgspec.Struct):
    """Handshake message of a prefetched page; other pages send it in their websocket's query."""

    client_id: _Id
    tab_id: _Id
    document_id: _Id
    old_tab_id: _Id | None = None
    next_message_id: int | None = None


class _Event(msgspec.Struct):
    client_id: _Id
    id: int
    listener_id: _Id
    args: Annotated[list[str | None], msgspec.Meta(max_length=_MOST_ARGUMENTS)]
    """Arguments, each encoded as JSON."""


class _Answer(msgspec.Struct):
    client_id: _Id
    request_id: _Id
    result: msgspec.Raw = msgspec.Raw(b"null")


class _Ack(msgspec.Struct):
    client_id: _Id
    next_message_id: int


_KINDS: dict[str, Any] = {
    "handshake": _Handshake,
    "event": _Event,
    "javascript_response": _Answer,
    "ack": _Ack,
    "log": msgspec.Raw,
}
_decode = msgspec.json.Decoder(tuple[Literal[tuple(_KINDS)], msgspec.Raw]).decode  # type: ignore[misc]
_DECODE = {name: msgspec.json.Decoder(kind).decode for name, kind in _KINDS.items()}


class BrowserPacket(packet.Packet):  # type: ignore[misc]
    """Socket.IO packet that accepts only browsers' messages: default namespace, known events, no attachments."""

    def decode(self, encoded_packet: Any) -> int:
        """Decode a packet, skipping unknown fields to save time and memory. Raises ValueError for unknown packets."""
        self.packet_type = int(encoded_packet[:1])
        if self.packet_type == packet.EVENT:
            acknowledged = _ACKNOWLEDGED.match(encoded_packet, 1)
            assert acknowledged is not None
            self.id = int(acknowledged[0]) if acknowledged[0] else None
            name, content = _decode(encoded_packet[acknowledged.end() :])
            said = _DECODE[name](content)
            if isinstance(said, _Event) and any(map(_is_unwieldy, said.args)):
                raise ValueError(f"an event has a structured argument of more than {_MOST_STRUCTURED} characters")
            self.data = [name, said if isinstance(said, msgspec.Raw) else msgspec.structs.asdict(said)]
        elif self.packet_type not in (packet.CONNECT, packet.DISCONNECT) or encoded_packet[1:2] == "/":
            raise ValueError(f"browsers do not send packets of type {self.packet_type}")
        return 0


def _is_unwieldy(argument: str | None) -> bool:
    return argument is not None and len(argument) > _MOST_STRUCTURED and not argument.startswith('"')


class RateLimitFilter(logging.Filter):
    """Passes at most one record a minute, because visitors can cause errors and must not fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return False
        if self._left_out:
            record.msg, record.args = f"{record.getMessage()} ({self._left_out} earlier records were suppressed)", ()
        self._next, self._left_out = now + _LOGGED_EVERY_S, 0
        return True


def harden(visitors: VisitorQueue) -> None:
    """Configure NiceGUI before it starts. Browsers' messages are handled in their turn by `visitors`."""
    # By default NiceGUI builds an error page and keeps it in memory for a while.
    core.app.add_exception_handler(404, lambda *_: PlainTextResponse("Page not found.", 404))
    core.app.add_exception_handler(Exception, lambda *_: PlainTextResponse("Internal error of the page.", 500))
    core.app.config.socket_io_js_transports = ["websocket"]
    core.app.storage.max_tab_storage_age = 0.0  # unused, and browsers could choose any keys
    core.sio.eio.transports = ["websocket"]
    core.sio.packet_class = BrowserPacket
    core.sio.async_handlers = False  # otherwise handlers' errors would be logged
    core.sio.on("log", _ignore)
    core.sio.on("javascript_response", _answer)
    _narrow_handshakes()
    _handle_in(visitors)
    for name in ("engineio.server", "socketio.server"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they log an error for every invalid message
    logging.getLogger("nicegui").addFilter(RateLimitFilter())


def _narrow_handshakes() -> None:
    """Accept only handshakes with the websocket's own ids, because NiceGUI stores state for each document."""
    handle = core.sio.handlers["/"]["handshake"]

    async def as_in_query(sid: str, message: dict[str, Any]) -> bool:
        query = parse_qs(core.sio.get_environ(sid)["QUERY_STRING"])
        is_same = all(query[name] == [message[name]] for name in ("client_id", "document_id", "tab_id"))
        return is_same and await handle(sid, message)

    core.sio.on("handshake", as_in_query)


def _handle_in(visitors: VisitorQueue) -> None:
    handle = core.sio.eio.handlers["message"]

    async def in_turn(sid: str, data: Any) -> None:
        async with visitors.turn(origin_of(core.sio.environ[sid]["asgi.scope"])):
            await handle(sid, data)

    core.sio.eio.on("message", in_turn)


async def _ignore(sid: str, message: object) -> None:
    """Drop a log message, because visitors must not write to the server's log."""


async def _answer(sid: str, message: dict[str, Any]) -> None:
    """Parse a script's result only if it is still awaited."""
    client = Client.instances.get(message["client_id"])
    if client is not None and message["request_id"] in JavaScriptRequest._instances:
        client.handle_javascript_response(message | {"result": json.loads(bytes(message["result"]).decode())})


class Visit:
    """A page open in a browser, with one websocket at a time."""

    def __init__(self, document_id: str) -> None:
        self.document_id = document_id
        self.replaced: asyncio.Future[None] | None = None
        """Completed when the open websocket must end."""


class WebsocketGuard:
    """Middleware that allows each served page one websocket, and only messages that browsers send. Pure ASGI.

    Only the browser that a page was served to knows the page's id, so the websocket needs a key if the page did. A
    second websocket replaces the first, which a browser may have lost long before the server notices.
    """

    def __init__(self, app: ASGIApp, force_reload: Callable[[Send], Awaitable[None]]) -> None:
        """`force_reload` ends an unknown websocket."""
        self._app = app
        self._force_reload = force_reload
        self._visits: WeakKeyDictionary[Client, Visit] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
        elif (visit := self._visit_of(scope)) is None:
            await self._force_reload(send)
        else:
            if visit.replaced is not None and not visit.replaced.done():
                visit.replaced.set_result(None)
            visit.replaced = asyncio.get_running_loop().create_future()
            socket = Socket(visit.replaced, receive, send)
            await self._app(scope, socket.receive, socket.send)

    def _visit_of(self, scope: Scope) -> Visit | None:
        """The visit that a websocket's query names; None if the query is invalid or the page unknown."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if not all(form.fullmatch(query.get(name, [""])[0]) for name, form in _QUERY.items()):
            return None
        client = Client.instances.get(query["client_id"][0])
        if client is None:
            return None
        document_id = query["document_id"][0]
        visit = self._visits.setdefault(client, Visit(document_id))
        return visit if visit.document_id == document_id else None


class Socket:
    """An open websocket, which can be ended and drops messages that browsers do not send."""

    def __init__(self, ended: asyncio.Future[None], receive: Receive, send: Send) -> None:
        self._ended = ended
        self._receive = receive
        self._send = send
        self._pinged = False

    async def receive(self) -> Message:
        """The next message; a disconnect if the websocket was replaced or received an unknown message."""
        coming = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((coming, self._ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not coming.done():
                coming.cancel()
        if coming.cancelled() or self._ended.done() or not self._is_spoken(message := coming.result()):
            self._end()
            return {"type": "websocket.disconnect", "code": 1008}
        return message

    async def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the websocket has ended or the browser does not read in time."""
        if self._ended.done():
            raise OSError("the websocket has ended")
        try:
            async with asyncio.timeout(_READ_S):
                await self._send(message)
        except TimeoutError:
            self._end()
            raise
        self._pinged = self._pinged or message.get("text") == _PING

    def _is_spoken(self, message: Message) -> bool:
        """Whether browsers send messages of this form."""
        if message["type"] != "websocket.receive":
            return True
        text = message.get("text") or ""
        if text == _PONG:
            was_pinged, self._pinged = self._pinged, False
            return was_pinged
        return text == _CLOSE or _SPOKEN.match(text) is not None

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
