"""Responses that are written as bytes, and the errors that every endpoint documents."""

from typing import Any

from fastapi import Response
from pydantic import BaseModel

from server.errors import ApiError, ErrorBody

_DESCRIPTIONS = {
    400: "The request is malformed or asks for something that this server cannot do.",
    401: "No API key, or a wrong one.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full.",
    500: "The server's fault.",
    503: "The engine is starting, draining or failed.",
    504: "The request took too long.",
}


def json_response(model: BaseModel) -> Response:
    """The object with the properties that were set, also those that are null."""
    return Response(model.model_dump_json(exclude_unset=True), media_type="application/json")


def error_response(error: ApiError) -> Response:
    """The error with its status and headers."""
    return Response(error.body(), error.status, dict(error.headers), media_type="application/json")


def documented_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`."""
    return {status: {"model": ErrorBody, "description": _DESCRIPTIONS[status]} for status in statuses}
