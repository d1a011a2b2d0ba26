"""Access control for the page: asks for an API key where the API requires one, and sets security headers.

NiceGUI runs only for visitors with a valid key.
"""

import hashlib
import hmac
import secrets
import ssl
import time
from html import escape
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.page.api import Api, ApiError, UnexpectedAnswerError, can_be_sent

_HTML = (Path(__file__).parent / "static" / "entrance.html").read_text()
_TICKET = "samewise_page"
_TICKET_S = 12 * 3600
_POLICY = "; ".join(
    (
        "default-src 'self'",
        # Vue compiles its templates, which needs 'unsafe-eval'. Model output never becomes a template: it is sanitised,
        # and without 'unsafe-inline' neither inline handlers nor javascript: links run.
        "script-src 'self' 'unsafe-eval' 'nonce-{nonce}'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",  # an answer with a picture must not reveal its reader to another host
        "font-src 'self' data:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


class Entrance:
    """Forwards requests to the page, and asks for a key where the API requires one.

    A key is exchanged for a ticket, a cookie that gives access to the page only. The tab stores the key, and its script
    sends the key again when the ticket has expired.
    """

    def __init__(self, base_url: str, page: ASGIApp, trusted: ssl.SSLContext | None = None) -> None:
        """`base_url` is the API's address with /v1; `trusted` has its certificate."""
        self._api = Api(base_url, trusted)
        self._page = page
        self._secret = secrets.token_bytes(32)

    async def close(self) -> None:
        await self._api.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ticket = Request(scope).cookies.get(_TICKET, "")
        problem = None if self._is_valid(ticket) else await self._problem("")
        app = self._page if problem is None else SecurityHeaders(_ask_for_key(problem))
        await app(scope, receive, send)

    async def take_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Exchange the key in the `authorization` header for a ticket, or answer with the API's reason for refusing."""
        key = Request(scope).headers.get("authorization", "").removeprefix("Bearer ")
        problem = await self._problem(key if can_be_sent(key) else "")
        response: Response
        if problem is None:
            response = Response(status_code=204)
            ticket = self._ticket(str(int(time.time()) + _TICKET_S))
            response.set_cookie(_TICKET, ticket, path=None, httponly=True, samesite="strict")
        else:
            response = JSONResponse({"message": str(problem)})
        await SecurityHeaders(response)(scope, receive, send)

    async def _problem(self, key: str) -> ApiError | None:
        """Why the API refuses this key or cannot be reached; None if it accepts the key or fails otherwise."""
        try:
            await self._api.models(key)
        except UnexpectedAnswerError:
            return None
        except ApiError as problem:
            return problem if problem.wants_key or problem.status is None else None
        return None

    def _ticket(self, expires: str) -> str:
        return f"{expires}.{hmac.new(self._secret, expires.encode(), hashlib.sha256).hexdigest()}"

    def _is_valid(self, ticket: str) -> bool:
        expires = ticket.partition(".")[0]
        is_own = ticket.isascii() and hmac.compare_digest(ticket, self._ticket(expires))
        return is_own and int(expires) > time.time()


def _ask_for_key(problem: ApiError) -> Response:
    """The HTML that asks for a key, or reports that the API cannot be reached."""
    wanted = "key" if problem.wants_key else "nothing"
    html = _HTML.replace("{wanted}", wanted).replace("{reason}", escape(str(problem)))
    return HTMLResponse(html, headers={"cache-control": "no-store"})


class SecurityHeaders:
    """Middleware that adds a content security policy to all answers and its nonce to HTML's scripts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        nonce = secrets.token_urlsafe(16)
        start: Message | None = None
        html = b""

        async def secured(message: Message) -> None:
            nonlocal start, html
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                _secure(headers, nonce)
                if headers.get("content-type", "").startswith("text/html"):
                    start = message  # the nonces change the content length
                    return
            elif start is not None and message["type"] == "http.response.body":
                html += message.get("body", b"")
                if message.get("more_body", False):
                    return
                html = html.replace(b"<script", f'<script nonce="{nonce}"'.encode())
                MutableHeaders(scope=start)["content-length"] = str(len(html))
                await send(start)
                await send({"type": "http.response.body", "body": html})
                return
            await send(message)

        # The scripts could not be found in a compressed body.
        headers = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
        is_html = scope["path"].endswith("/")
        await self._app({**scope, "headers": headers} if is_html else scope, receive, secured)


def _secure(headers: MutableHeaders, nonce: str) -> None:
    headers["content-security-policy"] = _POLICY.format(nonce=nonce)
    headers["x-content-type-options"] = "nosniff"
    headers["referrer-policy"] = "no-referrer"
    headers["cross-origin-opener-policy"] = "same-origin"
