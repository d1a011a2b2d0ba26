"""Parses JSON bodies and validates them by a schema."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from server.errors import InvalidRequestError
from server.http.validation import from_validation, json_path, no_body

MAX_DEPTH = 64
"""The most levels of nested arrays and objects. No sensible request needs more."""

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> Any:
    """The value of a JSON text by RFC 8259: UTF-8, finite numbers, no lone surrogates, at most MAX_DEPTH levels.

    Raises InvalidRequestError.
    """
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique_keys)
    except UnicodeDecodeError:
        raise InvalidRequestError("The request body is not valid UTF-8.") from None
    except json.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at line {error.lineno}, column {error.colno}.") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # Python converts no integer of more than 4,300 digits
        raise _not_json("a number is too large.") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if _ESCAPED_SURROGATE.search(text):
        _check_strings(value)
    return value


def _not_json(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"We could not parse the JSON body of your request: {reason}")


def _refuse_constant(name: str) -> float:
    raise _not_json(f"{name} is not a JSON number.")


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise _not_json("a number is too large.")
    return number


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object with duplicate keys: either value would be ignored in silence."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _not_json("an object has the same key twice.")
    return value


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(f"The JSON body of your request is nested deeper than {MAX_DEPTH} levels.")


def _check_depth(root: object) -> None:
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
    if level:
        raise _too_deep()


def _check_strings(root: object) -> None:
    """Refuse strings that contain half of a surrogate pair, which is not text."""
    pending: list[tuple[object, tuple[str | int, ...]]] = [(root, ())]
    while pending:
        value, location = pending.pop()
        if isinstance(value, str):
            _check_text(value, location)
        elif isinstance(value, dict):
            for key in value:
                _check_text(key, location)
            pending += [(item, (*location, key)) for key, item in value.items()]
        elif isinstance(value, list):
            pending += [(item, (*location, index)) for index, item in enumerate(value) if not isinstance(item, int)]


def _check_text(text: str, location: tuple[str | int, ...]) -> None:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        path = json_path(location)
        message = f"Invalid '{path}': the string has a lone surrogate, which is not a character."
        raise InvalidRequestError(message, param=path or None, code="invalid_value")


_Body = TypeVar("_Body", bound=BaseModel)


def validated(schema: type[_Body], body: bytes, context: Mapping[str, Any] | None = None) -> _Body:
    """Parse and validate a body; `context` goes to the schema's own validators. Raises InvalidRequestError."""
    value = parse_json(body) if body.strip() else None
    if value is None:
        raise no_body()
    try:
        return schema.model_validate(value, context=context)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None
