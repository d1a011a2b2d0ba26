"""NiceGUI, narrowed to what the page needs: whatever it does for anybody is done without a key."""

import logging
import re
import time
from typing import Annotated, Any
from urllib.parse import parse_qs

import msgspec
from nicegui import Client, core, json
from nicegui.javascript_request import JavaScriptRequest
from socketio import packet
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from server.page.pacing import Turns, origin_of

_MOST_STRUCTURED = 1 << 16
"""Characters of an event's argument that is not just a string: lists and objects take the most time to read."""
_LOGGED_EVERY_S = 60.0
_MOST_ARGUMENTS = 16
_ACKNOWLEDGED = re.compile("[0-9]{0,9}")

_Id = Annotated[str, msgspec.Meta(max_length=36)]


class _Handshake(msgspec.Struct):
    """Sent by a page that was prefetched; other pages send this in the query of their websocket."""

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
    """Arguments, each in JSON."""


class _Answer(msgspec.Struct):
    client_id: _Id
    request_id: _Id
    result: msgspec.Raw = msgspec.Raw(b"null")


class _Ack(msgspec.Struct):
    client_id: _Id
    next_message_id: int


class _Handshakes(msgspec.Struct, array_like=True, tag="handshake"):
    said: _Handshake


class _Events(msgspec.Struct, array_like=True, tag="event"):
    said: _Event


class _Answers(msgspec.Struct, array_like=True, tag="javascript_response"):
    said: _Answer


class _Acks(msgspec.Struct, array_like=True, tag="ack"):
    said: _Ack


class _Logs(msgspec.Struct, array_like=True, tag="log"):
    said: msgspec.Raw


_decode = msgspec.json.Decoder(_Handshakes | _Events | _Answers | _Acks | _Logs).decode


class BrowserPacket(packet.Packet):  # type: ignore[misc]
    """Socket.IO packet that accepts only what browsers send: the default namespace, known events, no attachments."""

    def decode(self, encoded_packet: Any) -> int:
        """Skip what is not expected, so that it takes neither time nor memory. Raises ValueError."""
        self.packet_type = int(encoded_packet[:1])
        if self.packet_type == packet.EVENT:
            acknowledged = _ACKNOWLEDGED.match(encoded_packet, 1)
            assert acknowledged is not None
            self.id = int(acknowledged[0]) if acknowledged[0] else None
            event = _decode(encoded_packet[acknowledged.end() :])
            if isinstance(event, _Events) and any(map(_is_unwieldy, event.said.args)):
                raise ValueError("an argument of an event is too large")
            said = event.said
            name = event.__struct_config__.tag
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


def narrow(turns: Turns) -> None:
    """Before NiceGUI is started. The messages of browsers are handled in `turns`."""
    core.app.add_exception_handler(404, _not_found)
    core.app.add_exception_handler(Exception, _failed)
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
    """Take only the ids that the websocket has in its query: NiceGUI keeps something for each document."""
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


def _not_found(request: Request, error: Exception) -> Response:
    """Instead of a page, which is kept for a while."""
    return PlainTextResponse("There is no such page.", 404)


def _failed(request: Request, error: Exception) -> Response:
    return PlainTextResponse("The page has failed.", 500)


async def _ignore(sid: str, message: object) -> None:
    """Anybody could write anything to the server's log."""


async def _answer(sid: str, message: dict[str, Any]) -> None:
    """Read what a script returned, if somebody still waits for it."""
    client = Client.instances.get(message["client_id"])
    if client is not None and message["request_id"] in JavaScriptRequest._instances:
        client.handle_javascript_response(message | {"result": json.loads(bytes(message["result"]).decode())})
