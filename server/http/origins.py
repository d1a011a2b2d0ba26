"""Checks which web pages may use the server: by origin (CORS) and by host name (against DNS rebinding)."""

import logging
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import shorten

METHODS = ("GET", "POST", "HEAD", "DELETE", "OPTIONS")
EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-samewise-ignored"),
    *("retry-after", "retry-after-ms", "x-should-retry"),
    *(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
)
"""Response headers that a page's scripts may read, because clients need them."""

_LOCALHOST = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")
"""Origins of pages that this machine serves. No other page can have one of them."""


@dataclass(frozen=True, slots=True)
class Origins:
    """The origins of web pages that may use the server."""

    named: frozenset[str]
    """`*` means all."""
    has_localhost: bool

    @classmethod
    def of(cls, setting: Collection[str], *, has_keys: bool) -> "Origins":
        """The origins in the setting `cors_origins`; by default localhost, or none if the server has keys."""
        named = frozenset(setting or (["none"] if has_keys else ["localhost"])) - {"none"}
        return cls(named - {"localhost"}, "localhost" in named)

    def __contains__(self, origin: str) -> bool:
        is_local = self.has_localhost and _LOCALHOST.fullmatch(origin) is not None
        return is_local or "*" in self.named or origin in self.named


def allow_origins(app: Starlette, origins: Origins, exposed: Collection[str] = ()) -> None:
    """Let pages of these origins use the application. Their scripts may also read the headers `exposed`.

    Call it after all other middleware was added, so that it surrounds them. Then it answers preflights, which browsers
    send without the key, and adds the headers to errors that let a page read them.
    """
    if origins.named or origins.has_localhost:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins.named,
            allow_origin_regex=_LOCALHOST.pattern if origins.has_localhost else None,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=(*EXPOSED_HEADERS, *exposed),
        )


_HOST = re.compile(r"(?:\[(?P<ipv6>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::\d*)?")
_RESERVED = (".localhost", ".local", ".internal", ".home.arpa")
"""Domains below which names cannot be registered."""
_logger = logging.getLogger("samewise.http")


def guarded(app: ASGIApp, allowed: Collection[str], *, has_keys: bool) -> ASGIApp:
    """The application behind a HostCheck, unless all hosts are allowed, or there are keys and no allowed hosts."""
    return app if "*" in allowed or (has_keys and not allowed) else HostCheck(app, allowed)


class HostCheck:
    """Refuses requests and websockets to host names that an attacker could register, unless they are allowed.

    If an attacker's host name resolves to this server, a browser treats the attacker's page as the server's own and
    lets it read all answers. A key prevents that; without one, only the host name reveals the page. IP addresses, names
    without a dot, this machine's own name and reserved names are safe.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """`allowed` are names in lower case; `*.example.com` means all names below example.com."""
        self._app = app
        self._names = {socket.gethostname().lower(), *allowed}
        self._endings = (*_RESERVED, *(name[1:] for name in allowed if name.startswith("*.")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            hosts = Headers(scope=scope).getlist("host")  # browsers always send it
            refused = next((host for host in hosts if not self._allows(host)), None)
            if refused is not None:
                await _refuse(refused, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match["name"]
        if name is None:
            return _is_address(match["ipv6"])
        name = name.removesuffix(".")
        return "." not in name or name in self._names or name.endswith(self._endings) or _is_address(name)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


async def _refuse(host: str, scope: Scope, receive: Receive, send: Send) -> None:
    shown = shorten(host)
    _logger.warning("Refused a request to the host %r, which is not in allowed_hosts.", shown)
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    message = f"The host '{shown}' is not allowed. Use an IP address, or add the host to the server's --allowed-hosts."
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "host_not_allowed"}
    await JSONResponse({"error": error}, status_code=403)(scope, receive, send)
