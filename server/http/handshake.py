"""Handshakes of the API's websockets, which pass through all middleware as GET requests.

So a handshake needs a key, has an id and an access log line, and is refused with a status and a JSON error.
"""

import logging

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import shorten
from server.http.origins import Origins

_KEY = "samewise.handshake"
_REFUSAL = "websocket.http.response"
"""The ASGI extension of servers that can refuse a handshake with any status."""
_logger = logging.getLogger("samewise.http")


def is_handshake(request: Request) -> bool:
    """Whether the request is a websocket's handshake. Status 101 accepts it."""
    return bool(request.scope["state"].get(_KEY))


class HandshakeMiddleware:
    """Turns websockets into GET requests. Pure ASGI; add it last, so that it is outermost.

    CORS does not apply to websockets: a browser lets any page open them, and sends the page's origin to check.
    """

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        """`origins` are the web pages, in addition to the server's own, that may use it from a browser."""
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
        await receive()  # websocket.connect
        forbidden = self._forbidden_origin(Headers(scope=scope))
        app = self._app if forbidden is None else _refusal(forbidden)
        await app(as_get, exchange.receive, exchange.send)

    def _forbidden_origin(self, headers: Headers) -> str | None:
        """The request's origin if its web page may not use the server, otherwise None."""
        origin = headers.get("origin")
        if origin is None or origin in self._origins:
            return None
        _, is_web, place = origin.partition("://")  # a browser's origin is a scheme and a host
        return None if is_web and place == headers.get("host", "").lower() else origin


def _refusal(origin: str) -> ASGIApp:
    shown = shorten(origin)
    _logger.warning("Refused a websocket from the origin %r, which is not in cors_origins.", shown)
    message = f"Web pages from '{shown}' may not open websockets here. Add the origin to the server's --cors-origins."
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
        """Return an empty body, then a disconnect; once the websocket is open, its own messages."""
        if not (self._is_open or self._is_read):
            self._is_read = True
            return {"type": "http.request", "body": b"", "more_body": False}
        message = await self._receive()
        return message if self._is_open else {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Translate the messages of a response; pass on messages of an open websocket unchanged."""
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
