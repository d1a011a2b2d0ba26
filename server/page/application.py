"""The page as an ASGI application."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from nicegui import app as nicegui_app
from nicegui import ui
from starlette.types import Send

from server.page.api import Api
from server.page.entrance import SecurityHeaders
from server.page.load.poller import Watches
from server.page.nicegui_hardening import Sockets, harden
from server.page.shell import Shell
from server.page.throttle import Room, Turns

_STATIC = Path(__file__).parent / "static"
_RECONNECT_S = 30.0
"""An answer goes on so long for a browser that does not respond, such as a telephone that was put away."""
_MESSAGES_KEPT = 2000
"""Messages for a browser that comes back within that time."""


def make_page(base_url: str, path: str, send_back: Callable[[Send], Awaitable[None]]) -> FastAPI:
    """The page below `path` for the API at `base_url`, with /v1. Once in a process, because NiceGUI has one app only.

    `send_back` ends a websocket whose page is gone.
    """
    api = Api(base_url)
    watches = Watches(api)
    host = FastAPI(openapi_url=None)
    nicegui_app.add_static_files("/static", _STATIC, max_cache_age=0)
    turns = Turns()
    harden(turns)

    @ui.page("/", title="Samewise", favicon=_STATIC / "favicon.svg", language="en-US", dark=None)
    async def page() -> None:
        await Shell(api, watches).build()

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
    host.add_middleware(Sockets, send_back=send_back)
    host.add_middleware(Room, turns=turns, path=f"{path}/")
    nicegui_app.on_shutdown(api.close)
    return host
