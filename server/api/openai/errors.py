"""OpenAI's error object: the body of every response that is not a success, and the event that ends a failed stream."""

import json
from typing import Annotated

from fastapi import Response
from msgspec import to_builtins
from starlette.types import Scope

from server.api.answer_object import AnswerObject, doc
from server.errors import (
    ApiError,
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    QuotaError,
    RateLimitError,
    RequestLimitError,
    TokenLimitError,
)

_TYPES: dict[type[ApiError], str] = {
    InvalidRequestError: "invalid_request_error",
    ForbiddenError: "invalid_request_error",
    AuthenticationError: "invalid_request_error",
    RequestLimitError: "requests",
    TokenLimitError: "tokens",
    QuotaError: "insufficient_quota",
    RateLimitError: "rate_limit_exceeded",
    ApiError: "server_error",
}

DONE = b"data: [DONE]\n\n"
"""The last frame of every stream."""


class ErrorDetail(AnswerObject):
    """An error in OpenAI's format."""

    message: Annotated[str, doc("What is wrong, for people.")]
    type: Annotated[str, doc("OpenAI's type of the error.")]
    param: Annotated[str | None, doc("JSON path of the wrong field, such as `messages[2].content`.")]
    code: Annotated[str | None, doc("What is wrong, for programs, such as `unknown_parameter`.")]


class ErrorBody(AnswerObject):
    """The body of every response that is not a success, and of the error event of a stream."""

    error: ErrorDetail


def error_type(error: type[ApiError]) -> str:
    """OpenAI's type of an error."""
    return next(name for kind, name in _TYPES.items() if issubclass(error, kind))


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error with its status and headers."""
    return Response(error_body(error), error.status, dict(error.headers), media_type="application/json")


def stream_error(error: ApiError, scope: Scope, num_frames: int) -> bytes:
    """Implements StreamErrorWriter."""
    return error_frames(error)


def error_frames(error: ApiError) -> bytes:
    """The last frames of a stream that fails."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


def error_body(error: ApiError) -> bytes:
    """The error as JSON, in ASCII."""
    kind = error_type(type(error))
    detail = ErrorDetail(message=error.message, type=kind, param=error.param, code=error.code)
    return json.dumps(to_builtins(ErrorBody(error=detail))).encode()
