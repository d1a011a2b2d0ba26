"""The page's websockets: who may open one, how many there are, and what may be sent. Pure ASGI."""

import asyncio
import re
from urllib.parse import parse_qs
from weakref import WeakKeyDictionary

from nicegui import Client
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.page.gate import send_back

_READ_S = 20.0
"""How long a browser may take to read what is sent. Afterwards it has to connect again."""
_ID = re.compile("[0-9a-f-]{36}")
_QUERY = {
    "client_id": _ID,
    "document_id": _ID,
    "tab_id": _ID,
    "old_tab_id": re.compile("null|" + _ID.pattern),
    "next_message_id": re.compile("[0-9]{1,9}"),
}
"""What NiceGUI keeps or reads of a websocket's query, and how browsers write it."""
_SPOKEN = re.compile("4[012]")
"""Engine.IO messages that browsers send: Socket.IO's connect, disconnect and event."""
_PING, _PONG, _CLOSE = "2", "3", "1"


class Visit:
    """One page in one browser, which has one websocket at a time."""

    def __init__(self, document_id: str) -> None:
        self.document_id = document_id
        self.replaced: asyncio.Future[None] | None = None
        """Of the websocket that is open: done when its time is over."""


class Sockets:
    """Gives each page that was served one websocket, and lets only that through which browsers send.

    The id of a page is known to nobody but the browser that it was served to, so whoever needed a key for that needs
    one for the websocket, too. A second websocket of a page takes the place of the first, which a browser may have
    lost long before the server notices.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._visits: WeakKeyDictionary[Client, Visit] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
        elif (visit := self._visit_of(scope)) is None:
            await send_back(send)
        else:
            if visit.replaced is not None and not visit.replaced.done():
                visit.replaced.set_result(None)
            visit.replaced = asyncio.get_running_loop().create_future()
            socket = Socket(visit.replaced, receive, send)
            await self._app(scope, socket.receive, socket.send)

    def _visit_of(self, scope: Scope) -> Visit | None:
        """The visit that a websocket belongs to, by its query; None if there is none."""
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
        """The next message; the last one as soon as the websocket was replaced, or something else was sent."""
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
