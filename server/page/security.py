"""What a browser may do with the page: nothing that the page itself does not bring along. Pure ASGI."""

import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY = "; ".join(
    (
        "default-src 'self'",
        # Vue makes functions of its templates. What a model writes comes to no place where it could be one: it is
        # sanitised, and neither inline handlers nor javascript: links run without 'unsafe-inline'.
        "script-src 'self' 'unsafe-eval' 'nonce-{nonce}'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",  # or an answer with a picture would tell another host that it was read, and by whom
        "font-src 'self' data:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


class SecurityHeaders:
    """Adds a content security policy to all answers, and its nonce to the scripts of HTML."""

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
                    start = message  # its length is not known before its scripts have their nonce
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

        # Compressed, the scripts could not be found.
        headers = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
        is_html = scope["path"].endswith("/")
        await self._app({**scope, "headers": headers} if is_html else scope, receive, secured)


def _secure(headers: MutableHeaders, nonce: str) -> None:
    headers["content-security-policy"] = _POLICY.format(nonce=nonce)
    headers["x-content-type-options"] = "nosniff"
    headers["referrer-policy"] = "no-referrer"
    headers["cross-origin-opener-policy"] = "same-origin"
