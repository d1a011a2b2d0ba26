"""How often things are done that go on beside others."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from nicegui import background_tasks

_SHOWN_EVERY_S = 0.05
_SHARE = 0.1
"""Of the time that may go into showing what grows."""


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
