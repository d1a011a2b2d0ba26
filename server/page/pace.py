"""Work that goes on beside other work, as long as that takes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def now_and_then(act: Callable[[], None], every_s: float) -> AsyncIterator[None]:
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
