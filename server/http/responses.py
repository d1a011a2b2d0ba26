"""Whole answers and errors, and waiting for an answer only as long as its client does."""

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
"""Answers a request, given by its scope, with an error."""
StreamErrorWriter = Callable[[ApiError, Scope, int], bytes]
"""Writes the frames that end a stream early, given the error, the request's scope, and the number of frames so far."""
_PIECE_BYTES = 1 << 20
_T = TypeVar("_T")


def json_response(content: object, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer, encoded unless it is bytes. A large one is sent in pieces, so as not to block the loop."""
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
    """The error as the API that the request belongs to writes it."""
    write: ErrorWriter = scope["state"]["error_writer"]
    return write(error, scope)


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """The result of the work, which is cancelled if the client leaves first; the request's body must have been read.

    Raises ClientDisconnect if the client has left.
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
