"""Where the page stands beside the API: its paths go there, all others past it. Pure ASGI."""

import asyncio
import gc
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from fastapi import FastAPI

PATH = "/page"
MAX_WEBSOCKETS = 256
"""Open at a time: each page that somebody looks at has one, and no key is asked for it."""


def is_installed() -> bool:
    """Whether what the page needs is there (`samewise[page]`)."""
    return find_spec("nicegui") is not None


class PageGate:
    """Before an API: takes the paths of the page, and leads those who ask for `/` there.

    The page is loaded when somebody asks for it first, which takes a second or two. Until then it costs nothing, and
    requests to the API always just a look at their paths.
    """

    def __init__(self, api: ASGIApp, base_url: str) -> None:
        """`base_url` is where the page reaches the API, with /v1."""
        self._api = api
        self._base_url = base_url
        self._loading = asyncio.Lock()
        self._page: FastAPI | None = None
        self._running = AsyncExitStack()
        self._websockets = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            path = scope["path"]
            if path.startswith(PATH + "/"):
                await self._to_page(scope, receive, send)
                return
            if path in ("/", PATH) and scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
                # Relative, so that it also holds behind a proxy that has put all of this below a path of its own.
                await RedirectResponse(PATH[1:] + "/")(scope, receive, send)
                return
        await self._api(scope, receive, send)

    async def close(self) -> None:
        """Everybody who looks is left."""
        await self._running.aclose()

    async def _to_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = await self._loaded()
        if scope["type"] == "http":
            await page(scope, receive, send)
        elif self._websockets >= MAX_WEBSOCKETS:
            await send({"type": "websocket.close", "code": 1013, "reason": "too many pages are open"})
        else:
            self._websockets += 1
            try:
                await page(scope, receive, send)
            finally:
                self._websockets -= 1

    async def _loaded(self) -> "FastAPI":
        async with self._loading:
            if self._page is None:
                await asyncio.to_thread(_import)
                from server.page.application import make_page  # noqa: PLC0415

                page = make_page(self._base_url, PATH)
                await self._running.enter_async_context(page.router.lifespan_context(page))
                gc.freeze()  # as what was there when the server began to answer, which the server freezes as well
                self._page = page
        return self._page


def _import() -> None:
    """In a thread, so that running answers go on meanwhile."""
    import server.page.application  # noqa: F401, PLC0415
