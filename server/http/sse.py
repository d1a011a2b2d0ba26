"""Server-sent events: a stream begins when there is something to say, stays alive in silence, and ends with [DONE]."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from fastapi import Request
from pydantic import BaseModel
from sse_starlette import EventSourceResponse

from server.config import Settings
from server.http.disconnect import wait_unless_gone
from server.http.middleware import record_of, report

_DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"


class _Ended:
    """Stands for the end of a generator."""


async def event_stream(request: Request, chunks: AsyncGenerator[BaseModel], settings: Settings) -> EventSourceResponse:
    """The response that sends the chunks.

    Waits for the first chunk, so that an error before it becomes a real status; but no longer than a proxy would put up
    with silence: after `keepalive_s` the stream begins with a comment. Raises what the first chunk raises, and
    ClientDisconnect.
    """
    first = asyncio.ensure_future(anext(chunks, _Ended()))
    await wait_unless_gone(request, first, timeout_s=settings.keepalive_s)
    if first.done():
        first.result()  # raises here what must not become an event
    return EventSourceResponse(
        _events(request, chunks, first, settings.keepalive_s),
        ping=0,  # `_with_silence` knows when there was silence, the library does not
        sep="\n",
        send_timeout=settings.request_timeout_s,
    )


async def _events(
    request: Request,
    chunks: AsyncGenerator[BaseModel],
    first: "asyncio.Future[BaseModel | _Ended]",
    keepalive_s: float,
) -> AsyncIterator[bytes]:
    try:
        async with aclosing(_with_silence(chunks, first, keepalive_s)) as spaced:
            async for chunk in spaced:
                yield _COMMENT if chunk is None else _event(chunk)
    except Exception as error:  # noqa: BLE001 - reported
        known = report(error, request.scope)
        record_of(request).stream_error = known.status
        yield b"data: " + known.body() + b"\n\n"
    yield _DONE


def _event(chunk: BaseModel) -> bytes:
    """Some readers take U+2028 and its like for the end of a line: nothing but ASCII is sent."""
    return f"data: {chunk.model_dump_json(exclude_unset=True, ensure_ascii=True)}\n\n".encode()


async def _with_silence(
    chunks: AsyncGenerator[BaseModel], first: "asyncio.Future[BaseModel | _Ended]", silence_s: float
) -> AsyncGenerator[BaseModel | None]:
    """The chunks, the first of which is already on its way, and None for every `silence_s` without one."""
    pending = first
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=silence_s)
            if not done:
                yield None
                continue
            chunk = pending.result()
            if isinstance(chunk, _Ended):
                return
            yield chunk
            pending = asyncio.ensure_future(anext(chunks, _Ended()))
    finally:
        if not pending.cancel():  # the generator stands at a yield and must be closed; otherwise it was cancelled
            await chunks.aclose()
