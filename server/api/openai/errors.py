"""OpenAI's error object: the body of every response that is not a success, and the event that ends a failed stream."""

import json

from fastapi import Response
from pydantic import BaseModel, Field
from starlette.types import Scope

from server.errors import (
    ApiError,
    AuthenticationError,
    InvalidRequestError,
    QuotaError,
    RateLimitError,
    RequestLimitError,
    TokenLimitError,
)

_TYPES: dict[type[ApiError], str] = {
    InvalidRequestError: "invalid_request_error",
    AuthenticationError: "invalid_request_error",
    RequestLimitError: "requests",
    TokenLimitError: "tokens",
    QuotaError: "insufficient_quota",
    RateLimitError: "rate_limit_exceeded",
    ApiError: "server_error",
}

DONE = b"data: [DONE]\n\n"
"""The last frame of every stream."""


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="What is wrong, in a sentence for people.")
    type: str = Field(description="Whose fault it is, in OpenAI's words.")
    param: str | None = Field(description="JSON path of the field that is to blame, such as `messages[2].content`.")
    code: str | None = Field(description="What is wrong, for programs, such as `unknown_parameter`.")


class ErrorBody(BaseModel):
    """The body of every response that is not a success, and of the error event of a stream."""

    error: ErrorDetail


def error_type(error: type[ApiError]) -> str:
    """Whose fault it is, in OpenAI's words."""
    return next(name for kind, name in _TYPES.items() if issubclass(error, kind))


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error with its status and headers."""
    return Response(error_body(error), error.status, dict(error.headers), media_type="application/json")


def stream_error(error: ApiError, scope: Scope, num_frames: int) -> bytes:
    """See StreamErrorWriter."""
    return error_frames(error)


def error_frames(error: ApiError) -> bytes:
    """The last frames of a stream that an error ends."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


def error_body(error: ApiError) -> bytes:
    """The error as JSON, in ASCII."""
    detail = {"message": error.message, "type": error_type(type(error)), "param": error.param, "code": error.code}
    return json.dumps({"error": detail}).encode()
