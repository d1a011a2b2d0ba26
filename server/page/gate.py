"""The gate before an API: passes the page's paths to the page, and all others to the API. Pure ASGI.

It is the only module of the page that is imported before somebody opens the page.
"""

import asyncio
import gc
import json
from contextlib import AsyncExitStack
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.page.entrance import Entrance

PATH = "/page"
WEBSOCKETS = {f"{PATH}/": 3 << 20}
"""The most bytes of a message by path: browsers send at most a million UTF-16 units of three bytes."""
MAX_WEBSOCKETS = 256
"""Open at a time, one for each page."""
_SOCKET_PATH = f"{PATH}/_nicegui_ws/"
_OPENED = "0" + json.dumps({"sid": "none", "upgrades": [], "pingInterval": 1000, "pingTimeout": 1000, "maxPayload": 1})
_REFUSED = "44" + json.dumps({"message": "Implicit handshake failed"})


def is_installed() -> bool:
    """Whether the page's dependencies are there (`samewise[page]`)."""
    return find_spec("nicegui") is not None


class PageGate:
    """Middleware for the page below `/page/`, to which it redirects from `/`.

    The page is loaded with its first request that has a key, if the API wants one. That takes a second or two.
    """

    def __init__(self, api: ASGIApp, base_url: str) -> None:
        """`base_url` is the API's address with /v1."""
        self._api = api
        self._base_url = base_url
        self._loading = asyncio.Lock()
        self._entrance: Entrance | None = None
        self._page: FastAPI | None = None
        self._running = AsyncExitStack()
        self._websockets = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            path = scope["path"]
            if path.startswith(PATH + "/"):
                to = self._to_page if scope["type"] == "http" else self._to_websocket
                await to(scope, receive, send)
                return
            if path in ("/", PATH) and scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
                # Relative, so that it also holds behind a proxy that has put all of this below a path of its own.
                await RedirectResponse(PATH[1:] + "/")(scope, receive, send)
                return
        await self._api(scope, receive, send)

    async def close(self) -> None:
        await self._running.aclose()

    async def _to_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == f"{PATH}/":
            await (await self._found_entrance())(scope, receive, send)
        elif path == f"{PATH}/key" and scope["method"] == "POST":
            await (await self._found_entrance()).take_key(scope, receive, send)
        elif self._page is None or path.startswith(_SOCKET_PATH):
            await PlainTextResponse("There is no such page.", 404)(scope, receive, send)
        else:
            await self._page(scope, receive, send)

    async def _to_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._websockets >= MAX_WEBSOCKETS:
            await send({"type": "websocket.close", "code": 1013, "reason": "too many pages are open"})
        elif self._page is None:
            await send_back(send)
        else:
            self._websockets += 1
            try:
                await self._page(scope, receive, send)
            finally:
                self._websockets -= 1

    async def _found_entrance(self) -> "Entrance":
        async with self._loading:
            if self._entrance is None:
                # In a thread, so that running answers go on.
                await asyncio.to_thread(import_module, "server.page.entrance")
                from server.page.entrance import Entrance  # noqa: PLC0415

                self._entrance = Entrance(self._base_url, self._load_and_serve)
                self._running.push_async_callback(self._entrance.close)
        return self._entrance

    async def _load_and_serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = await self._loaded()
        await page(scope, receive, send)

    async def _loaded(self) -> "FastAPI":
        async with self._loading:
            if self._page is None:
                await asyncio.to_thread(import_module, "server.page.application")
                from server.page.application import make_page  # noqa: PLC0415

                page = make_page(self._base_url, PATH, send_back)
                await self._running.enter_async_context(page.router.lifespan_context(page))
                gc.freeze()  # as the server does with everything that was there when it began to answer
                self._page = page
        return self._page


async def send_back(send: Send) -> None:
    """End a websocket and have its browser load the page again, in the words of Socket.IO and NiceGUI.

    A browser whose page this server does not know would try for ever if its websocket were only refused.
    """
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.send", "text": _OPENED})
    await send({"type": "websocket.send", "text": _REFUSED})
