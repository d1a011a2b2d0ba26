"""NiceGUI reduced to what the page needs, because whatever it does for a visitor it does without a key.

`Sockets` decides who may open a websocket, `BrowserPacket` what may be sent, and `harden` configures NiceGUI.
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

from server.page.throttle import Turns, origin_of

_READ_S = 20.0
"""A browser that takes longer to read what is sent has to connect again."""
_ID = re.compile("[0-9a-f-]{36}")
_QUERY = {
    "client_id": _ID,
    "document_id": _ID,
    "tab_id": _ID,
    "old_tab_id": re.compile("null|" + _ID.pattern),
    "next_message_id": re.compile("[0-9]{1,9}"),
}
"""The parts of a websocket's query that NiceGUI reads, as browsers write them."""
_SPOKEN = re.compile("4[012]")
"""Engine.IO messages of browsers: Socket.IO's connect, disconnect and event."""
_PING, _PONG, _CLOSE = "2", "3", "1"
_MOST_STRUCTURED = 1 << 16
"""Characters of an argument that is not just a string, because lists and objects take the most time to read."""
_LOGGED_EVERY_S = 60.0
_MOST_ARGUMENTS = 16
_ACKNOWLEDGED = re.compile("[0-9]{0,9}")

_Id = Annotated[str, msgspec.Meta(max_length=36)]


class _Handshake(msgspec.Struct):
    """Sent by a page that was prefetched; other pages send it in the query of their websocket."""

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
    """Each in JSON."""


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
    """Socket.IO packet that accepts only what browsers send: the default namespace, known events, no attachments."""

    def decode(self, encoded_packet: Any) -> int:
        """Skip unknown fields, so that they take neither time nor memory. Raises ValueError for unknown packets."""
        self.packet_type = int(encoded_packet[:1])
        if self.packet_type == packet.EVENT:
            acknowledged = _ACKNOWLEDGED.match(encoded_packet, 1)
            assert acknowledged is not None
            self.id = int(acknowledged[0]) if acknowledged[0] else None
            name, content = _decode(encoded_packet[acknowledged.end() :])
            said = _DECODE[name](content)
            if isinstance(said, _Event) and any(map(_is_unwieldy, said.args)):
                raise ValueError("an argument of an event is too large")
            self.data = [name, said if isinstance(said, msgspec.Raw) else msgspec.structs.asdict(said)]
        elif self.packet_type not in (packet.CONNECT, packet.DISCONNECT) or encoded_packet[1:2] == "/":
            raise ValueError("browsers send no such packet")
        return 0


def _is_unwieldy(argument: str | None) -> bool:
    return argument is not None and len(argument) > _MOST_STRUCTURED and not argument.startswith('"')


class Sparing(logging.Filter):
    """Logs at most one record a minute, because visitors can cause errors and must not fill a disk."""

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
            record.msg, record.args = f"{record.getMessage()} ({self._left_out} earlier records were left out)", ()
        self._next, self._left_out = now + _LOGGED_EVERY_S, 0
        return True


def harden(turns: Turns) -> None:
    """Configure NiceGUI before it starts. It handles messages of browsers in `turns`."""
    # In place of pages, which NiceGUI would keep for a while.
    core.app.add_exception_handler(404, lambda *_: PlainTextResponse("There is no such page.", 404))
    core.app.add_exception_handler(Exception, lambda *_: PlainTextResponse("The page has failed.", 500))
    core.app.config.socket_io_js_transports = ["websocket"]
    core.app.storage.max_tab_storage_age = 0.0  # browsers choose its keys, and the page keeps nothing there
    core.sio.eio.transports = ["websocket"]
    core.sio.packet_class = BrowserPacket
    core.sio.async_handlers = False  # or their errors would go to the log
    core.sio.on("log", _ignore)
    core.sio.on("javascript_response", _answer)
    _narrow_handshakes()
    _handle_in(turns)
    for name in ("engineio.server", "socketio.server"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they write an error for whatever a client does wrong
    logging.getLogger("nicegui").addFilter(Sparing())


def _narrow_handshakes() -> None:
    """Accept only the ids of the websocket's query, because NiceGUI keeps something for each document."""
    handle = core.sio.handlers["/"]["handshake"]

    async def as_in_query(sid: str, message: dict[str, Any]) -> bool:
        query = parse_qs(core.sio.get_environ(sid)["QUERY_STRING"])
        is_same = all(query[name] == [message[name]] for name in ("client_id", "document_id", "tab_id"))
        return is_same and await handle(sid, message)

    core.sio.on("handshake", as_in_query)


def _handle_in(turns: Turns) -> None:
    handle = core.sio.eio.handlers["message"]

    async def in_turn(sid: str, data: Any) -> None:
        async with turns.turn(origin_of(core.sio.environ[sid]["asgi.scope"])):
            await handle(sid, data)

    core.sio.eio.on("message", in_turn)


async def _ignore(sid: str, message: object) -> None:
    """Drop it, because otherwise anybody could write anything to the server's log."""


async def _answer(sid: str, message: dict[str, Any]) -> None:
    """Parse a script's result only if somebody still waits for it."""
    client = Client.instances.get(message["client_id"])
    if client is not None and message["request_id"] in JavaScriptRequest._instances:
        client.handle_javascript_response(message | {"result": json.loads(bytes(message["result"]).decode())})


class Visit:
    """A page in a browser, which has one websocket at a time."""

    def __init__(self, document_id: str) -> None:
        self.document_id = document_id
        self.replaced: asyncio.Future[None] | None = None
        """Done once the open websocket has to end."""


class Sockets:
    """Middleware that gives each served page one websocket and passes on only what browsers send. Pure ASGI.

    Only the browser that a page was served to knows the page's id, so the websocket needs a key if the page did. A
    second websocket replaces the first, which a browser may have lost long before the server notices.
    """

    def __init__(self, app: ASGIApp, send_back: Callable[[Send], Awaitable[None]]) -> None:
        """`send_back` ends a websocket whose page is gone."""
        self._app = app
        self._send_back = send_back
        self._visits: WeakKeyDictionary[Client, Visit] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
        elif (visit := self._visit_of(scope)) is None:
            await self._send_back(send)
        else:
            if visit.replaced is not None and not visit.replaced.done():
                visit.replaced.set_result(None)
            visit.replaced = asyncio.get_running_loop().create_future()
            socket = Socket(visit.replaced, receive, send)
            await self._app(scope, socket.receive, socket.send)

    def _visit_of(self, scope: Scope) -> Visit | None:
        """The visit of a websocket by its query; None if there is none."""
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
    """An open websocket."""

    def __init__(self, ended: asyncio.Future[None], receive: Receive, send: Send) -> None:
        self._ended = ended
        self._receive = receive
        self._send = send
        self._pinged = False

    async def receive(self) -> Message:
        """The next message; a disconnect once the websocket was replaced or sent something unknown."""
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
        """Raises OSError if the websocket has ended, or the browser does not read."""
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
        """Whether a browser would send this."""
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
