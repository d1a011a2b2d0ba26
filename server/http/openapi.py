"""The OpenAPI document: FastAPI's, with the media type of streams and without an error that never occurs."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server import __version__
from server.api.answers.objects import ChatCompletionChunk

GENERATION_ERRORS = (400, 401, 404, 413, 415, 429, 500, 503, 504)
_NEVER_SENT = "422"
_REFERENCES = "#/components/schemas/{model}"


def streamed(chunk: type[BaseModel]) -> dict[str, Any]:
    """A 200 response that is also offered as a stream of these chunks."""
    reference = {"$ref": _REFERENCES.format(model=chunk.__name__)}
    description = "The answer; with `stream`, events whose data is a chunk each, then `[DONE]`."
    return {"description": description, "content": {"text/event-stream": {"x-event-schema": reference}}}


def install_openapi(app: FastAPI) -> None:
    """Make the application serve the document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _build(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title="Samewise", version=__version__, description=app.description, routes=app.routes)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop(_NEVER_SENT, None)
    schemas: dict[str, Any] = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _, chunks = models_json_schema([(ChatCompletionChunk, "serialization")], ref_template=_REFERENCES)
    for name, schema in chunks["$defs"].items():
        schemas.setdefault(name, schema)
    return document
