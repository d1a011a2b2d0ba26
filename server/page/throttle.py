"""Limits on the page's use of the event loop, so that API requests stay fast."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv6Address, ip_address, ip_network
from weakref import WeakValueDictionary

from nicegui import Client, background_tasks
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_PAGES = 256
"""Pages open at a time, including pages loaded in the last minute that never connected."""
MOST_PAGES_OF_ORIGIN = MOST_PAGES // 2
"""Pages open at a time for one origin, so that one address cannot lock out all others."""
_SHOWN_EVERY_S = 0.05
_SHARE = 0.1
"""Maximum fraction of the time spent on showing growing answers."""
_REST = 2.0
"""Pause after visitors' work, as a multiple of its duration: visitors get at most a third of the event loop."""
_LEAST_WORK_S = 0.0002
"""Minimum charged per piece of work, because the surrounding libraries take time that is not measured."""
_LEAST_REST_S = 0.005
"""Shorter pauses accumulate, because timers are too coarse for them."""
_MOST_REST_S = 0.5
"""Maximum pause."""


@asynccontextmanager
async def throttled(show: Callable[[], None]) -> AsyncIterator[Callable[[], None]]:
    """Throttle `show`: yields a function that schedules a call of it. `show` is also called at the end."""
    more = asyncio.Event()

    async def show_now_and_then() -> None:
        while True:
            await more.wait()
            more.clear()
            started = time.perf_counter()
            show()
            await asyncio.sleep(max(_SHOWN_EVERY_S, (time.perf_counter() - started) / _SHARE))

    task = background_tasks.create(show_now_and_then(), name="show what grows")
    try:
        yield more.set
    finally:
        task.cancel()
        show()


class VisitorQueue:
    """Runs visitors' work one piece at a time, with pauses between the pieces.

    This work needs no key, so no amount of it may block the event loop. It waits for its turn and is never refused.
    Origins take turns, so an origin that sends a lot delays only itself.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._locks_of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._rest_s = 0.0

    @asynccontextmanager
    async def turn(self, origin: str) -> AsyncIterator[None]:
        """Wait for this origin's turn; the context is one piece of its work."""
        of_origin = self._locks_of.setdefault(origin, asyncio.Lock())
        async with of_origin, self._lock:
            started = time.thread_time()
            try:
                yield
            finally:
                self._rest_s += max(_LEAST_WORK_S, time.thread_time() - started) * _REST
                if self._rest_s >= _LEAST_REST_S:
                    await asyncio.sleep(min(self._rest_s, _MOST_REST_S))
                    self._rest_s = 0.0


def origin_of(scope: Scope) -> str:
    """The client address of a connection; for IPv6 its /64 network, which usually belongs to one customer.

    All clients of a proxy are one origin, because forwarding headers can be forged.
    """
    host: str = (scope.get("client") or ("", 0))[0]
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address) or address.ipv4_mapped is not None:
        return host
    return str(ip_network((int(address), 64), strict=False))


class PageLimit:
    """Middleware that limits the number of open pages and builds pages in turns. Pure ASGI."""

    def __init__(self, app: ASGIApp, visitors: VisitorQueue, path: str) -> None:
        self._app = app
        self._visitors = visitors
        self._path = path
        self._waiting: Counter[str] = Counter()
        """Number of pages being built, by origin."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != self._path:
            await self._app(scope, receive, send)
        elif self._has_room(origin := origin_of(scope)):
            self._waiting[origin] += 1
            try:
                messages = await self._made(scope, receive, origin)
            finally:
                self._waiting -= Counter({origin: 1})
            for message in messages:
                await send(message)
        else:
            text = "Too many pages are open. Try again in a minute."
            await PlainTextResponse(text, 503, {"Retry-After": "60"})(scope, receive, send)

    def _has_room(self, origin: str) -> bool:
        pages = Counter(origin_of(client.request.scope) for client in Client.instances.values()) + self._waiting
        return pages.total() < MOST_PAGES and pages[origin] < MOST_PAGES_OF_ORIGIN

    async def _made(self, scope: Scope, receive: Receive, origin: str) -> list[Message]:
        """Build the whole answer, because a slow reader must not hold up the turn."""
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        async with self._visitors.turn(origin):
            await self._app(scope, receive, keep)
        return messages
