"""From the bytes of a body to what its schema says they are."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from server.http.strict_json import parse_json
from server.http.validation import from_validation, no_body

_Body = TypeVar("_Body", bound=BaseModel)


def validated(schema: type[_Body], body: bytes, context: Mapping[str, Any] | None = None) -> _Body:
    """The body as the schema has it; `context` is for the schema's own validators. Raises InvalidRequestError."""
    value = parse_json(body) if body.strip() else None
    if value is None:
        raise no_body()
    try:
        return schema.model_validate(value, context=context)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None
