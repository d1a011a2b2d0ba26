"""The page as an ASGI application."""

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from nicegui import app as nicegui_app
from nicegui import ui
from starlette.types import Send

from server.page.api import Api
from server.page.entrance import SecurityHeaders
from server.page.load.poller import SharedPollers
from server.page.nicegui_hardening import WebsocketGuard, harden
from server.page.shell import Shell
from server.page.throttle import PageLimit, VisitorQueue

_STATIC = Path(__file__).parent / "static"
_RECONNECT_S = 30.0
"""An answer continues this long for a disconnected browser, for example on a locked phone."""
_MESSAGES_KEPT = 2000
"""Messages kept for a browser that reconnects within `_RECONNECT_S`."""


def make_page(
    base_url: str, path: str, force_reload: Callable[[Send], Awaitable[None]], trusted: ssl.SSLContext | None = None
) -> FastAPI:
    """Build the page below `path` for the API at `base_url`, which includes /v1.

    Call it once in a process, because NiceGUI has one global app. `force_reload` ends an unknown websocket.
    """
    api = Api(base_url, trusted)
    pollers = SharedPollers(api)
    host = FastAPI(openapi_url=None)
    nicegui_app.add_static_files("/static", _STATIC, max_cache_age=0)
    visitors = VisitorQueue()
    harden(visitors)

    @ui.page("/", title="Samewise", favicon=_STATIC / "favicon.svg", language="en-US", dark=None)
    async def page() -> None:
        await Shell(api, pollers).build()

    ui.run_with(
        host,
        mount_path=path,
        binding_refresh_interval=None,
        reconnect_timeout=_RECONNECT_S,
        message_history_length=_MESSAGES_KEPT,
        tailwind=False,
        show_welcome_message=False,
    )
    host.add_middleware(SecurityHeaders)
    host.add_middleware(WebsocketGuard, force_reload=force_reload)
    host.add_middleware(PageLimit, visitors=visitors, path=f"{path}/")
    nicegui_app.on_shutdown(api.close)
    return host
