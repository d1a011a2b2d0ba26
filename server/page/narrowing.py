"""NiceGUI, narrowed to what the page needs: whatever it does for anybody is done without a key."""

import logging
from typing import Any

from nicegui import core
from socketio import packet
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response


class TextPacket(packet.Packet):  # type: ignore[misc]
    """What browsers may say: of announced attachments, any number would be kept until the last has come."""

    def decode(self, encoded_packet: Any) -> int:
        """Raises ValueError for a packet with attachments."""
        attachments: int = super().decode(encoded_packet)
        if self.packet_type in (packet.BINARY_EVENT, packet.BINARY_ACK):
            raise ValueError("attachments are not taken")
        return attachments


def narrow() -> None:
    """Before NiceGUI is started."""
    core.app.add_exception_handler(404, _not_found)
    core.app.add_exception_handler(Exception, _failed)
    core.app.config.socket_io_js_transports = ["websocket"]
    core.sio.eio.transports = ["websocket"]
    core.sio.packet_class = TextPacket
    core.sio.on("log", _ignore)
    for name in ("engineio.server", "socketio.server"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they write an error for whatever a client does wrong


def _not_found(request: Request, error: Exception) -> Response:
    """Instead of a page, which is kept for a while."""
    return PlainTextResponse("There is no such page.", 404)


def _failed(request: Request, error: Exception) -> Response:
    return PlainTextResponse("The page has failed.", 500)


async def _ignore(sid: str, message: object) -> None:
    """Anybody could write anything to the server's log."""
