"""JSON responses, error responses, and work that is cancelled when its client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from server.errors import ApiError

ErrorWriter = Callable[[ApiError, Scope], Response]
"""Makes the response for an error, given the request's scope."""
StreamErrorWriter = Callable[[ApiError, Scope, int], bytes]
"""Writes the frames that end a stream with an error, given the request's scope and the number of frames so far."""
_PIECE_BYTES = 1 << 20
_T = TypeVar("_T")


def json_response(content: object, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response, encoded unless it is bytes. Large ones are sent in pieces, so as not to block the event loop."""
    headers = headers or {}
    content = content if isinstance(content, bytes) else msgspec.json.encode(content)
    if len(content) <= _PIECE_BYTES:
        return Response(content, media_type="application/json", headers=dict(headers))
    sized = {**headers, "content-length": str(len(content))}
    return StreamingResponse(_pieces(content), media_type="application/json", headers=sized)


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), _PIECE_BYTES):
        yield content[start : start + _PIECE_BYTES]


def error_response(error: ApiError, scope: Scope) -> Response:
    """The response for an error, in the format of the request's API."""
    write: ErrorWriter = scope["state"]["error_writer"]
    return write(error, scope)


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """Return the result of the work, or cancel it and raise ClientDisconnect if the client disconnects first.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()
    return await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
