"""Values of JSON that a schema names: its constants."""

import json
import math
from typing import Any

from server.generation.constraints.errors import ConstraintError, check_text, under
from server.generation.constraints.patterns import UNWRITABLE

_LARGEST = 2**63 - 1024


def check_value(value: Any, path: str, depth: int) -> int:
    """How many values there are in it, itself included.

    Raises ConstraintError if it is nested deeper than `depth`, or has what llguidance cannot write exactly.
    """
    if depth < 0:
        raise ConstraintError(path, "Nested too deeply.")
    if isinstance(value, str):
        check_text(value, path)
        if not UNWRITABLE.isdisjoint(map(ord, value)):
            raise ConstraintError(path, "Has a control character that cannot be written.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConstraintError(path, "Not a number of JSON.")
    elif isinstance(value, int) and (abs(value) > _LARGEST or float(value) != value):
        raise ConstraintError(path, "Integers beyond 2**53 are supported only if they are doubles, and below 2**63.")
    elif isinstance(value, list):
        return 1 + sum(check_value(item, under(path, index), depth - 1) for index, item in enumerate(value))
    elif isinstance(value, dict):
        for key in value:
            check_text(key, path)
        return 1 + sum(check_value(item, under(path, key), depth - 1) for key, item in value.items())
    return 1


def canonical(value: Any) -> str:
    """The same text for values that JSON schema takes to be equal."""
    return json.dumps(_plain(value), sort_keys=True)


def type_of(value: Any) -> str:
    """The name of the value's type, `number` for integers too."""
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (int | float, "number"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
