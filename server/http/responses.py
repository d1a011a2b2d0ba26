"""Responses that are written as bytes, and the errors that every endpoint documents."""

from typing import Any

from fastapi import Response
from pydantic import BaseModel

from server.errors import ApiError, ErrorBody

ERRORS = {
    400: "The request is malformed or too long for the context (code `context_length_exceeded`), or a field of it is "
    "unknown, out of range or not supported; or its settings ruled out every token, which shows only while the answer "
    "is made (`no_token_left`).",
    401: "No API key, or a wrong one, where keys are configured.",
    404: "There is no such model or path.",
    405: "The path takes other methods.",
    413: "The body is larger than `max_body_mib`.",
    415: "The body is not declared as `application/json`.",
    429: "The server has as many requests as it can hold.",
    500: "A fault of the server; its log has more, under the request's id.",
    503: "The engine is starting, draining or failed. While it is replaced, requests wait.",
    504: "The answer took longer than `request_timeout_s`.",
}
"""When each status is sent."""


def json_response(model: BaseModel) -> Response:
    """The object with the properties that were set, also those that are null."""
    return Response(model.model_dump_json(exclude_unset=True), media_type="application/json")


def error_response(error: ApiError) -> Response:
    """The error with its status and headers."""
    return Response(error.body(), error.status, dict(error.headers), media_type="application/json")


def documented_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`."""
    return {status: {"model": ErrorBody, "description": ERRORS[status]} for status in statuses}
