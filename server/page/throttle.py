"""Limits to what the page takes from answers: for views that grow, and for visitors without a key."""

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
"""Open at a time, including those that were loaded within the last minute and never shown."""
MOST_PAGES_OF_ORIGIN = MOST_PAGES // 2
"""So many, because no address may keep all others out."""
_SHOWN_EVERY_S = 0.05
_SHARE = 0.1
"""The share of the time that may go into showing what grows."""
_REST = 2.0
"""Rest after the work of visitors, as a multiple of its time: they get at most a third of the event loop."""
_LEAST_WORK_S = 0.0002
"""Charged for any piece of work, because the libraries around it take time that is not measured."""
_LEAST_REST_S = 0.005
"""Shorter rests are saved up, because timers are not as fine."""
_MOST_REST_S = 0.5
"""The longest rest, also after work during which the whole server was slow."""


@asynccontextmanager
async def now_and_then(show: Callable[[], None]) -> AsyncIterator[Callable[[], None]]:
    """Yields a function that notes that there is more: `show` follows it, but not too often, and at the end."""
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


class Turns:
    """Runs the work of visitors one piece at a time, with rests between the pieces.

    This work needs no key, so however much there is, it must leave the event loop to others. It waits for its turn and
    is never refused. Origins alternate: one that sends a lot delays itself.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._locks_of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._rest_s = 0.0

    @asynccontextmanager
    async def turn(self, origin: str) -> AsyncIterator[None]:
        """Wait for a turn of this origin; the context is one piece of its work."""
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
    """The address of a connection; for IPv6 the network that providers give to one customer.

    A proxy is one origin, because anybody could send the headers in which it names its clients.
    """
    host: str = (scope.get("client") or ("", 0))[0]
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address) or address.ipv4_mapped is not None:
        return host
    return str(ip_network((int(address), 64), strict=False))


class Room:
    """Middleware that makes pages in turns while there is room for them. Pure ASGI."""

    def __init__(self, app: ASGIApp, turns: Turns, path: str) -> None:
        self._app = app
        self._turns = turns
        self._path = path
        self._waiting: Counter[str] = Counter()
        """Pages that are being made, by origin."""

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
        """The whole answer, because sending it during the turn would make others wait for a slow reader."""
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        async with self._turns.turn(origin):
            await self._app(scope, receive, keep)
        return messages
