"""Answers that are ready, and errors, each in the form of the API that it belongs to."""

from collections.abc import AsyncIterator, Callable, Mapping

import msgspec
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Scope

from server.errors import ApiError

ErrorWriter = Callable[[ApiError, Scope], Response]
"""Answers a request, given by its scope, with an error."""
StreamErrorWriter = Callable[[ApiError, Scope, int], bytes]
"""The frames that end a stream in the middle, given the error, the request's scope, and how many frames there were.

For whoever passes a stream on and knows no more of it.
"""


_PIECE_BYTES = 1 << 20


def json_response(content: object, headers: Mapping[str, str] | None = None) -> Response:
    """The answer, encoded unless it is bytes.

    One of many megabytes is sent in pieces: written at once, it would be copied while nobody else is answered.
    """
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
    """The error in the form of the API that the request belongs to."""
    write: ErrorWriter = scope["state"]["error_writer"]
    return write(error, scope)
