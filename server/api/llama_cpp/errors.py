"""Errors in llama.cpp's format."""

from typing import Annotated

from fastapi import Response
from msgspec import UNSET, UnsetType
from starlette.types import Scope

from server.api.answer_object import AnswerObject, doc
from server.errors import (
    ApiError,
    AuthenticationError,
    ContextLengthError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    RateLimitError,
    UnavailableError,
)
from server.http.event_stream import ascii_json

_TYPES: dict[type[ApiError], str] = {
    ContextLengthError: "exceed_context_size_error",
    NotFoundError: "not_found_error",
    InvalidRequestError: "invalid_request_error",
    ForbiddenError: "permission_error",
    AuthenticationError: "authentication_error",
    RateLimitError: "rate_limit_error",
    UnavailableError: "unavailable_error",
    ApiError: "server_error",
}


class LlamaErrorDetail(AnswerObject):
    """An error in llama.cpp's format."""

    code: Annotated[int, doc("The HTTP status.")]
    message: Annotated[str, doc("What is wrong, for people.")]
    type: Annotated[str, doc("llama.cpp's type of the error; `rate_limit_error` is an extension.")]
    param: Annotated[str | UnsetType, doc("Extension: JSON path of the wrong field.")] = UNSET
    error_code: Annotated[str | UnsetType, doc("Extension: what is wrong, such as `unknown_parameter`.")] = UNSET
    n_prompt_tokens: Annotated[int | UnsetType, doc("With `exceed_context_size_error`.")] = UNSET
    n_ctx: Annotated[int | UnsetType, doc("With `exceed_context_size_error`.")] = UNSET


class LlamaErrorBody(AnswerObject):
    """The body of every response that is not a success, and of the error event of a stream."""

    error: LlamaErrorDetail


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error with its status and headers."""
    return Response(_error_body(error), error.status, dict(error.headers), media_type="application/json")


def stream_error(error: ApiError, scope: Scope, num_frames: int) -> bytes:
    """Implements StreamErrorWriter."""
    return error_frame(error)


def error_frame(error: ApiError) -> bytes:
    """The last frame of a stream that fails."""
    return b"data: " + _error_body(error) + b"\n\n"


def _error_body(error: ApiError) -> bytes:
    size = (error.num_tokens, error.capacity) if isinstance(error, ContextLengthError) else (UNSET, UNSET)
    detail = LlamaErrorDetail(
        code=error.status,
        message=error.message,
        type=next(name for kind, name in _TYPES.items() if isinstance(error, kind)),
        param=UNSET if error.param is None else error.param,
        error_code=UNSET if error.code is None else error.code,
        n_prompt_tokens=size[0],
        n_ctx=size[1],
    )
    return ascii_json(LlamaErrorBody(error=detail))
