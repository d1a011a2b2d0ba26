"""Websockets of the API: their handshakes are GET requests, and pass as such through all that looks at requests.

So a handshake needs a key, has an id and a line in the log, and is refused with an error in JSON and its status.
"""

import logging
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import shorten
from server.http.cors import Origins

_KEY = "samewise.handshake"
_REFUSAL = "websocket.http.response"
"""What a server calls its ability to answer a handshake with a status of choice."""
_logger = logging.getLogger("samewise.http")


def is_handshake(request: Request) -> bool:
    """Whether the request may be answered with the status 101, and then in ASGI's messages for websockets."""
    return bool(request.scope["state"].get(_KEY))


class HandshakeMiddleware:
    """Turns websockets into GET requests. Pure ASGI; to be added last, so that it is outermost.

    A browser lets the pages of strangers open websockets anywhere and tells only where they are from: what CORS decides
    for other requests is decided here.
    """

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        """`origins` are those of web pages that may use the server from a browser, besides its own."""
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        state = {**scope.get("state", {}), _KEY: True}
        scheme = "https" if scope["scheme"] == "wss" else "http"
        as_get = {**scope, "type": "http", "method": "GET", "scheme": scheme, "state": state}
        exchange = _Exchange(receive, send, can_refuse=_REFUSAL in scope.get("extensions", {}))
        await receive()  # that it asks to connect
        stranger = self._stranger(Headers(scope=scope))
        app = self._app if stranger is None else _refusal(stranger)
        await app(as_get, exchange.receive, exchange.send)

    def _stranger(self, headers: Headers) -> str | None:
        """The origin of a web page that may not use the server; None if there is none."""
        origin = headers.get("origin")
        if origin is None or origin in self._origins:
            return None
        return None if urlsplit(origin).netloc == headers.get("host", "").lower() else origin


def _refusal(origin: str) -> ASGIApp:
    shown = shorten(origin)
    _logger.warning("Refused a websocket of the origin %r, which cors_origins does not name.", shown)
    message = f"Web pages of '{shown}' may not open websockets here. Have the server run with --cors-origins."
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "origin_not_allowed"}
    return JSONResponse({"error": error}, status_code=403)


class _Exchange:
    """A handshake and its answer as the messages of a request, until it is accepted."""

    def __init__(self, receive: Receive, send: Send, *, can_refuse: bool) -> None:
        self._receive = receive
        self._send = send
        self._can_refuse = can_refuse
        self._is_open = False
        self._is_read = False

    async def receive(self) -> Message:
        """Return the next message: a body of nothing, and then that the client has left, unless it is open."""
        if not (self._is_open or self._is_read):
            self._is_read = True
            return {"type": "http.request", "body": b"", "more_body": False}
        message = await self._receive()
        return message if self._is_open else {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Pass on a message; those of an open websocket are what they should be already."""
        kind: str = message["type"]
        if not kind.startswith("http."):
            await self._send(message)
        elif message.get("status") == 101:
            self._is_open = True
            await self._send({"type": "websocket.accept", "headers": message["headers"]})
        elif self._can_refuse:
            await self._send({**message, "type": f"websocket.{kind}"})
        elif kind == "http.response.start":
            await self._send({"type": "websocket.close"})
