"""Waiting for what comes soon, however busy the machine is."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Return once it holds. Raises TimeoutError if that takes too long."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (what is waited for sends no event)
            await asyncio.sleep(0.01)
