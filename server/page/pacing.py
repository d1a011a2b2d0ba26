"""How often things are done that go on beside others."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv6Address, ip_address, ip_network
from weakref import WeakValueDictionary

from nicegui import background_tasks
from starlette.types import Scope

_SHOWN_EVERY_S = 0.05
_SHARE = 0.1
"""Of the time that may go into showing what grows."""
_REST = 2.0
"""Rest after the work of visitors, as a multiple of its time: they get at most a third of the event loop."""
_LEAST_WORK_S = 0.0002
"""Charged for any piece of work, because the libraries around it take time that is not measured."""
_LEAST_REST_S = 0.005
"""Shorter rests are saved up, because timers are not as fine."""
_MOST_REST_S = 0.5
"""Also after work in which the whole server was slow."""


@asynccontextmanager
async def now_and_then(show: Callable[[], None]) -> AsyncIterator[Callable[[], None]]:
    """A function that says that there is more: `show` is called after it, but not too often, and at the end."""
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


@asynccontextmanager
async def repeated(act: Callable[[], None], every_s: float) -> AsyncIterator[None]:
    """Call `act` again and again until the context is left."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(every_s)
            act()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Turns:
    """Runs the work of visitors one piece at a time, with rests between the pieces.

    Nobody is asked for a key before this work, so it must leave the event loop to others, however much there is of
    it. Work waits for its turn and is never refused. Origins alternate: one that sends a lot delays itself.
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
    """The address that a connection comes from; of IPv6 the part that providers give to one customer.

    A proxy is one origin, because what it says of its clients could be said by anybody.
    """
    host: str = (scope.get("client") or ("", 0))[0]
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address) or address.ipv4_mapped is not None:
        return host
    return str(ip_network((int(address), 64), strict=False))
