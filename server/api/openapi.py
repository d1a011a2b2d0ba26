"""The OpenAPI document: FastAPI's, plus the bodies that routes read themselves, the streams and the errors."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server import __version__
from server.api.answer_object import components, schema_of
from server.api.dialect import Dialect
from server.api.openai.errors import ErrorBody
from server.http.event_stream import EVENT_STREAM

ERRORS = {
    400: "The request is malformed or too long for the context (code `context_length_exceeded`), or one of its fields "
    "is unknown, out of range or not supported. During generation: its settings ruled out every token (code "
    "`no_token_left`).",
    401: "The server requires an API key, and the request has none or an unknown one.",
    403: "The API key may not do this.",
    404: "There is no such model, path, or stored object.",
    405: "The path does not support this method.",
    413: "The body is larger than `max_body_mib`, or an uploaded file than `max_file_mib`.",
    415: "The body is compressed or not declared as `application/json`, or an upload not as `multipart/form-data`.",
    426: "The path accepts only websockets, and the request is not a websocket handshake.",
    429: "The server's queue is full, or the API key has reached a limit.",
    529: "The server's queue is full (Anthropic's API).",
    500: "A fault of the server. Its log has the details, under the request's id.",
    501: "The server does not support the operation (Ollama's API: changes of models).",
    503: "The engine is starting, draining or failed, or the body arrived too slowly while memory was short. While the "
    "engine restarts, requests wait.",
    504: "The answer took longer than `request_timeout_s`.",
}
"""When each status is sent."""


GENERATION_ERRORS = (400, 401, 404, 413, 415, 429, 500, 503, 504)
_NEVER_SENT = "422"
_REFERENCES = "#/components/schemas/{model}"


def answers(
    kind: Any,
    *errors: int,
    events: Any = None,
    end: str = ", then `[DONE]`",
    stream: str = EVENT_STREAM,
    error_body: Any = ErrorBody,
) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: an AnswerObject, a list of them, or a tuple of alternatives, and these errors.

    `events` is the type of the events of the answer's stream, if it has one; `end` describes what follows them. A
    `stream` of another content type has a line for each.
    """
    schema = {"anyOf": [schema_of(one) for one in kind]} if isinstance(kind, tuple) else schema_of(kind)
    success: dict[str, Any] = {"description": "The answer.", "content": {"application/json": {"schema": schema}}}
    if events is not None:
        form = f"server-sent events with a chunk each{end}" if stream == EVENT_STREAM else "a JSON object a line"
        success["description"] = f"The answer; with `stream`, {form}."
        success["content"][stream] = {"x-event-schema": schema_of(events)}
    return {200: success, **documented_errors(*errors, body=error_body)}


def takes(*bodies: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: the schema of a body that the route reads itself, or alternative schemas."""
    forms = [{"$ref": _REFERENCES.format(model=body.__name__)} for body in bodies]
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def takes_form(body: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra` for a body that is a form; its fields `a[b]` are an object `a` in the schema."""
    form: dict[str, Any] = {"schema": {"$ref": _REFERENCES.format(model=body.__name__)}}
    objects = [name for name, field in body.model_json_schema()["properties"].items() if "$ref" in str(field)]
    form["encoding"] = {name: {"style": "deepObject", "explode": True} for name in objects}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": form}}}


def documented_errors(*statuses: int, body: Any = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """A route's `responses` for errors with these statuses."""
    content = {"application/json": {"schema": schema_of(body)}}
    return {status: {"description": ERRORS[status], "content": content} for status in statuses}


def install_openapi(app: FastAPI, dialects: Sequence[Dialect]) -> None:
    """Make the application serve the document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app, dialects)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _build(app: FastAPI, dialects: Sequence[Dialect]) -> dict[str, Any]:
    document = get_openapi(title="Samewise", version=__version__, description=app.description, routes=app.routes)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop(_NEVER_SENT, None)
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    bodies = [(body, "validation") for dialect in dialects for body in dialect.requests.values()]
    _, others = models_json_schema(bodies, ref_template=_REFERENCES)  # type: ignore[arg-type]
    for name, schema in others["$defs"].items():
        schemas.setdefault(name, schema)
    schemas.update(components(document))
    return document
