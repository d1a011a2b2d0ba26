"""Anthropic's error object, its statuses, and the phrases that its clients react to."""

import json
from collections.abc import Sequence
from typing import Annotated

from fastapi import Response
from msgspec import UNSET, UnsetType, to_builtins
from starlette.types import Scope

from server.api.answer_object import AnswerObject, doc
from server.api.messages.schema import THREAD_UNSUPPORTED, MessagesRequest
from server.errors import (
    ApiError,
    AuthenticationError,
    BodyTooLargeError,
    ContextLengthError,
    ForbiddenError,
    InvalidRequestError,
    LimitError,
    NotFoundError,
    RateLimitError,
    RequestTimeoutError,
)
from server.http.middleware import record_in

OVERLOADED = 529
_TYPES: dict[type[ApiError], str] = {
    NotFoundError: "not_found_error",
    BodyTooLargeError: "request_too_large",
    InvalidRequestError: "invalid_request_error",
    ForbiddenError: "permission_error",
    AuthenticationError: "authentication_error",
    LimitError: "rate_limit_error",
    RateLimitError: "overloaded_error",
    RequestTimeoutError: "timeout_error",
    ApiError: "api_error",
}
_DOTTED = "messages."
"""How messages begin that name the place in Anthropic's way."""
_NOT_PERMITTED = frozenset({"unknown_parameter", "unsupported_parameter"})
_NEEDED = frozenset(name for name, field in MessagesRequest.model_fields.items() if field.is_required())
"""Required fields. Errors must not say that they are not permitted."""


class MessagesErrorDetails(AnswerObject):
    """Details of an error, for programs."""

    error_code: Annotated[str | UnsetType, doc("Extension: what is wrong, such as `unknown_parameter`.")] = UNSET
    param: Annotated[
        str | UnsetType,
        doc("Extension: JSON path of the wrong field, such as `messages[2].content`."),
    ] = UNSET
    unsupported: Annotated[Sequence[str] | UnsetType, doc(f"The unsupported fields, with `{THREAD_UNSUPPORTED}`.")] = (
        UNSET
    )


class MessagesErrorDetail(AnswerObject):
    """An error in Anthropic's format."""

    type: Annotated[str, doc("Anthropic's type of the error.")]
    message: Annotated[str, doc("What is wrong, for people.")]
    details: MessagesErrorDetails | UnsetType = UNSET


class MessagesErrorBody(AnswerObject, tag_field="type", tag="error"):
    """The body of every response that is not a success, and the event that ends a failed stream."""

    error: MessagesErrorDetail
    request_id: Annotated[str, doc("Id of the request in the server's log.")]


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error with its status and headers."""
    is_full = isinstance(error, RateLimitError) and not isinstance(error, LimitError)
    status = OVERLOADED if is_full else error.status
    content = error_body(error, record_in(scope).request_id)
    return Response(content, status, dict(error.headers), media_type="application/json")


def stream_error(error: ApiError, scope: Scope, num_frames: int) -> bytes:
    """Implements StreamErrorWriter."""
    return error_frame(error, record_in(scope).request_id)


def error_frame(error: ApiError, request_id: str) -> bytes:
    """The last frame of a stream that fails."""
    return b"event: error\ndata: " + error_body(error, request_id) + b"\n\n"


def error_body(error: ApiError, request_id: str) -> bytes:
    """The error as JSON, in ASCII."""
    kind = next(name for kind, name in _TYPES.items() if isinstance(error, kind))
    details = MessagesErrorDetails(
        error_code=error.code or UNSET,
        param=error.param or UNSET,
        unsupported=[error.param or ""] if error.code == THREAD_UNSUPPORTED else UNSET,
    )
    has_details = details != MessagesErrorDetails()
    detail = MessagesErrorDetail(type=kind, message=_message(error), details=details if has_details else UNSET)
    return json.dumps(to_builtins(MessagesErrorBody(error=detail, request_id=request_id))).encode()


def _message(error: ApiError) -> str:
    """The message with the wrong field's name, beginning with Anthropic's phrase if clients look for one."""
    if isinstance(error, ContextLengthError) and error.param == "messages":
        return f"{_too_long(error)}. {error.message}"
    if error.code in _NOT_PERMITTED and error.param not in _NEEDED:
        return f"{error.param}: Extra inputs are not permitted. {error.message}"
    is_named = error.param is None or error.param in error.message or error.message.startswith(_DOTTED)
    return error.message if is_named else f"{error.param}: {error.message}"


def _too_long(error: ContextLengthError) -> str:
    if error.max_tokens is None:
        return f"prompt is too long: {error.num_tokens} tokens > {error.capacity - 1} maximum"  # and one to answer with
    asked = f"{error.num_tokens} + {error.max_tokens} > {error.capacity}"
    return f"input length and `max_tokens` exceed context limit: {asked}, decrease input length or `max_tokens`"
