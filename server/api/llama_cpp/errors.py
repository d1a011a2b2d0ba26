"""llama.cpp's error object."""

import json

from fastapi import Response
from pydantic import BaseModel, Field
from starlette.types import Scope

from server.errors import (
    ApiError,
    AuthenticationError,
    ContextLengthError,
    InvalidRequestError,
    NotFoundError,
    RateLimitError,
    UnavailableError,
)

_TYPES: dict[type[ApiError], str] = {
    ContextLengthError: "exceed_context_size_error",
    NotFoundError: "not_found_error",
    InvalidRequestError: "invalid_request_error",
    AuthenticationError: "authentication_error",
    RateLimitError: "rate_limit_error",
    UnavailableError: "unavailable_error",
    ApiError: "server_error",
}


class LlamaErrorDetail(BaseModel):
    """What went wrong."""

    code: int = Field(description="The HTTP status.")
    message: str = Field(description="What is wrong, in a sentence for people.")
    type: str = Field(description="The kind of error, in llama.cpp's words; `rate_limit_error` is an extension.")
    param: str | None = Field(None, description="Extension: JSON path of the field that is to blame.")
    error_code: str | None = Field(None, description="Extension: what is wrong, such as `unknown_parameter`.")
    n_prompt_tokens: int | None = Field(None, description="With `exceed_context_size_error`.")
    n_ctx: int | None = Field(None, description="With `exceed_context_size_error`.")


class LlamaErrorBody(BaseModel):
    """The body of every response that is not a success, and of the error event of a stream."""

    error: LlamaErrorDetail


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error with its status and headers."""
    return Response(error_body(error), error.status, dict(error.headers), media_type="application/json")


def stream_error(error: ApiError, scope: Scope, num_frames: int) -> bytes:
    """See StreamErrorWriter."""
    return error_frame(error)


def error_frame(error: ApiError) -> bytes:
    """The last frame of a stream that an error ends."""
    return b"data: " + error_body(error) + b"\n\n"


def error_body(error: ApiError) -> bytes:
    """The error as JSON, in ASCII."""
    kind = next(name for kind, name in _TYPES.items() if isinstance(error, kind))
    detail: dict[str, object] = {"code": error.status, "message": error.message, "type": kind}
    told: dict[str, object] = {"param": error.param, "error_code": error.code}
    if isinstance(error, ContextLengthError):
        told |= {"n_prompt_tokens": error.num_tokens, "n_ctx": error.capacity}
    detail |= {name: value for name, value in told.items() if value is not None}
    return json.dumps({"error": detail}).encode()
