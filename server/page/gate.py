"""Middleware that routes the page's paths to the page and all other paths to the API. Pure ASGI.

This is the page's only module that is imported before the page is first opened.
"""

import asyncio
import gc
import json
import ssl
from contextlib import AsyncExitStack
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.page.entrance import Entrance

PATH = "/page"
WEBSOCKETS = {f"{PATH}/": 3 << 20}
"""Maximum message size in bytes by path: browsers send at most a million UTF-16 units of up to three bytes."""
MAX_WEBSOCKETS = 256
"""Websockets open at a time; each open page has one."""
_SOCKET_PATH = f"{PATH}/_nicegui_ws/"
_STRIPPED = b"x-forwarded-prefix"
_OPENED = "0" + json.dumps({"sid": "none", "upgrades": [], "pingInterval": 1000, "pingTimeout": 1000, "maxPayload": 1})
_REFUSED = "44" + json.dumps({"message": "Implicit handshake failed"})


def is_installed() -> bool:
    """Whether the page's dependencies (`samewise[page]`) are installed."""
    return find_spec("nicegui") is not None


class PageGate:
    """Serves the page below `/page/`, and redirects browsers from `/` to it.

    The page is loaded, in a second or two, by its first request (with a valid key, if the API requires one).
    """

    def __init__(self, api: ASGIApp, base_url: str, root_path: str = "", trusted: ssl.SSLContext | None = None) -> None:
        """`base_url` is the API's address with /v1, `root_path` a path that a proxy strips.

        `trusted` replaces the certificates that this machine trusts.
        """
        self._api = api
        self._base_url = base_url
        self._root_path = root_path
        self._trusted = trusted
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
                await to(self._below_root(scope), receive, send)
                return
            if scope["type"] == "http" and _leads_to_page(scope):
                # Relative if no root path is known, so that it also works behind a proxy that strips a prefix.
                target = f"{self._root_path}{PATH}/" if self._root_path else PATH[1:] + "/"
                await RedirectResponse(target)(scope, receive, send)
                return
        await self._api(scope, receive, send)

    async def close(self) -> None:
        await self._running.aclose()

    def _below_root(self, scope: Scope) -> Scope:
        """The request with the header from which NiceGUI takes the path that a proxy has stripped."""
        if not self._root_path:
            return scope
        headers = [(name, value) for name, value in scope["headers"] if name != _STRIPPED]
        return {**scope, "headers": [*headers, (_STRIPPED, self._root_path.encode())]}

    async def _to_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == f"{PATH}/":
            await (await self._found_entrance())(scope, receive, send)
        elif path == f"{PATH}/key" and scope["method"] == "POST":
            await (await self._found_entrance()).take_key(scope, receive, send)
        elif self._page is None or path.startswith(_SOCKET_PATH):
            await PlainTextResponse("Page not found.", 404)(scope, receive, send)
        else:
            await self._page(scope, receive, send)

    async def _to_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._websockets >= MAX_WEBSOCKETS:
            await send({"type": "websocket.close", "code": 1013, "reason": "too many pages are open"})
        elif self._page is None:
            await force_reload(send)
        else:
            self._websockets += 1
            try:
                await self._page(scope, receive, send)
            finally:
                self._websockets -= 1

    async def _found_entrance(self) -> "Entrance":
        async with self._loading:
            if self._entrance is None:
                # Imported in a thread, so that the event loop keeps serving requests.
                await asyncio.to_thread(import_module, "server.page.entrance")
                from server.page.entrance import Entrance  # noqa: PLC0415

                self._entrance = Entrance(self._base_url, self._load_and_serve, self._trusted)
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

                page = make_page(self._base_url, PATH, force_reload, self._trusted)
                await self._running.enter_async_context(page.router.lifespan_context(page))
                gc.freeze()  # as the server does after its own start: these objects live for ever
                self._page = page
        return self._page


def _leads_to_page(scope: Scope) -> bool:
    """Whether a request is led to the page: the page's own address, and `/` for browsers, which name HTML."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    return scope["path"] == PATH or (scope["path"] == "/" and "text/html" in Headers(scope=scope).get("accept", ""))


async def force_reload(send: Send) -> None:
    """End the websocket of an unknown page so that its browser reloads the page, by Socket.IO's and NiceGUI's protocol.

    If the websocket were only refused, the browser would reconnect for ever.
    """
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.send", "text": _OPENED})
    await send({"type": "websocket.send", "text": _REFUSED})
