"""The names by which a server may be asked, against web pages of strangers that have theirs lead to it (DNS rebinding).

A browser takes such a page for the server's own and lets it read all answers. A key stops that; without one, the name
that the request was sent to is what gives the page away. Pure ASGI.
"""

import logging
import re
import socket
from collections.abc import Collection
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import shorten

_HOST = re.compile(r"(?:\[(?P<ipv6>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::\d*)?")
_RESERVED = (".localhost", ".local", ".internal", ".home.arpa")
"""Below these, nobody can register a name."""
_logger = logging.getLogger("samewise.http")


def guarded(app: ASGIApp, allowed: Collection[str], *, has_keys: bool) -> ASGIApp:
    """The application, behind a check of names unless all are allowed, or none are given and a key is needed."""
    return app if "*" in allowed or (has_keys and not allowed) else HostCheck(app, allowed)


class HostCheck:
    """Refuses requests and websockets to names that neither are allowed nor can only lead to machines nearby.

    Those are IP addresses, names without a dot, this machine's own, and what is below a reserved name.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """`allowed` are names in lower case; `*.example.com` stands for all below example.com."""
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
    _logger.warning("Refused a request to the host %r, which allowed_hosts does not name.", shown)
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    message = f"The host '{shown}' is not allowed. Ask by an IP address, or have the server run with --allowed-hosts."
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "host_not_allowed"}
    await JSONResponse({"error": error}, status_code=403)(scope, receive, send)
