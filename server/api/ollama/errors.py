"""Errors in Ollama's format."""

from typing import Annotated

from fastapi import Response
from msgspec import UNSET, UnsetType
from starlette.types import Scope

from server.api.answer_object import AnswerObject, doc
from server.errors import ApiError
from server.http.event_stream import ascii_json

# Short: each API has its own form of errors.


class OllamaErrorBody(AnswerObject):
    """The body of every response that is not a success, and the last line of a stream that fails."""

    error: Annotated[str, doc("What is wrong, for people.")]
    param: Annotated[str | UnsetType, doc("Extension: JSON path of the wrong field.")] = UNSET
    code: Annotated[str | UnsetType, doc("Extension: what is wrong, such as `unknown_parameter`.")] = UNSET


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error with its status and headers."""
    return Response(_error_body(error), error.status, dict(error.headers), media_type="application/json")


def stream_error(error: ApiError, scope: Scope, num_frames: int) -> bytes:
    """Implements StreamErrorWriter."""
    return error_line(error)


def error_line(error: ApiError) -> bytes:
    """The last line of a stream that fails."""
    return _error_body(error) + b"\n"


def _error_body(error: ApiError) -> bytes:
    body = OllamaErrorBody(error=error.message, param=error.param or UNSET, code=error.code or UNSET)
    return ascii_json(body)
