"""The page as an application of its own, which is mounted beside an API or served alone."""

from pathlib import Path

from fastapi import FastAPI
from nicegui import app as nicegui_app
from nicegui import ui

from server.page.api import Api
from server.page.load.watch import Watches
from server.page.narrowing import narrow
from server.page.pacing import Turns
from server.page.room import Room
from server.page.security import SecurityHeaders
from server.page.shell import Shell
from server.page.sockets import Sockets

_STATIC = Path(__file__).parent / "static"
_RECONNECT_S = 30.0
"""How long an answer goes on for a browser that does not answer, such as a telephone that was put away."""
_MESSAGES_KEPT = 2000
"""For a browser that comes back within that time."""


def make_page(base_url: str, path: str) -> FastAPI:
    """The page below `path`, for the API at `base_url`, which has /v1. Once in a process: NiceGUI has one app only."""
    api = Api(base_url)
    watches = Watches(api)
    host = FastAPI(openapi_url=None)
    nicegui_app.add_static_files("/static", _STATIC, max_cache_age=0)
    turns = Turns()
    narrow(turns)

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
    host.add_middleware(Sockets)
    host.add_middleware(Room, turns=turns, path=f"{path}/")
    nicegui_app.on_shutdown(api.close)
    return host
