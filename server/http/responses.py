"""Errors as responses, each in the form of the API that it belongs to."""

from collections.abc import Callable

from fastapi import Response
from starlette.types import Scope

from server.errors import ApiError

ErrorWriter = Callable[[ApiError], bytes]
"""Writes the body of an error."""


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error with its status and headers."""
    write: ErrorWriter = scope["state"]["error_writer"]
    return Response(write(error), error.status, dict(error.headers), media_type="application/json")
