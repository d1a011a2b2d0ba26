"""Noticing that a client has left while its answer is still being computed."""

import asyncio
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect


class ClientTooSlowError(Exception):
    """The client did not read what it was sent."""


async def wait_unless_gone(request: Request, work: "asyncio.Future[Any]", *, timeout_s: float | None = None) -> None:
    """Returns when the work is done or the time is over; the body must have been read.

    Cancels the work and raises ClientDisconnect if the client leaves first. Cancels it also when cancelled itself.
    """
    gone = asyncio.create_task(_disconnected(request))
    try:
        done, _ = await asyncio.wait({work, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        work.cancel()
        raise
    finally:
        gone.cancel()
    if gone in done and work not in done:
        work.cancel()
        raise ClientDisconnect


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
