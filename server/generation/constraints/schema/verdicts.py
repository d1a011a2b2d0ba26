"""Keywords that cannot be enforced, and the uses of them that say nothing and may stand."""

from collections.abc import Callable, Mapping
from typing import Any

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_LEAP_YEARS = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00"
LEAP_DAYS = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|(?:{_LEAP_YEARS})-02-29)"
"""llguidance itself has 29 February in every year."""
DEPENDENTS: Mapping[str, tuple[str, ...]] = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items",),
    "items": ("items",),
}
"""What means more if something else is left out, and so must be left out too."""
_EVERYTHING: tuple[Any, ...] = (True, {})
_APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"})


def refusal(schema: Mapping[str, Any], keyword: str) -> str | None:
    """Why a keyword of the schema cannot be enforced; None if it can, or asks for nothing."""
    if keyword in {"minProperties", "maxProperties"}:
        return _refuse_property_count(schema, keyword)
    says_nothing = _REFUSED.get(keyword)
    if says_nothing is None or says_nothing(schema, schema[keyword]):
        return None
    return f"'{keyword}' is not supported."


def _refuse_property_count(schema: Mapping[str, Any], keyword: str) -> str | None:
    """Only the properties that are not declared are counted, or none told from some."""
    declared, required = schema.get("properties"), schema.get("required")
    names = set(declared) if isinstance(declared, dict) else set()
    known = set(required) if isinstance(required, list) and all(isinstance(name, str) for name in required) else set()
    if names <= known or schema[keyword] == 0:
        return None
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if closed and schema.get("minProperties", 0) in {0, 1} and schema.get("maxProperties", 1) == 1:
        return None
    return f"'{keyword}' is supported only if all of 'properties' are required."


def _never(_schema: Mapping[str, Any], _value: Any) -> bool:
    return False


def _if_everything(_schema: Mapping[str, Any], value: Any) -> bool:
    return value in _EVERYTHING


def _if_alone(schema: Mapping[str, Any], value: Any) -> bool:
    return value in _EVERYTHING or (value is False and not _APPLICATORS & schema.keys())


def _if_empty(_schema: Mapping[str, Any], value: Any) -> bool:
    return isinstance(value, dict) and not value


def _if_false(_schema: Mapping[str, Any], value: Any) -> bool:
    return value is False


def _without_branches(schema: Mapping[str, Any], _value: Any) -> bool:
    return "then" not in schema and "else" not in schema


def _if_any_name(_schema: Mapping[str, Any], value: Any) -> bool:
    return value in (*_EVERYTHING, {"type": "string"})


def _if_single(schema: Mapping[str, Any], value: Any) -> bool:
    return value is False or schema.get("maxItems") in (0, 1)


_REFUSED: Mapping[str, Callable[[Mapping[str, Any], Any], bool]] = {
    "not": _if_false,
    "if": _without_branches,
    "contains": _never,
    "propertyNames": _if_any_name,
    "uniqueItems": _if_single,
    "dependentRequired": _if_empty,
    "dependentSchemas": _if_empty,
    "dependencies": _if_empty,
    "unevaluatedProperties": _if_alone,
    "unevaluatedItems": _if_everything,
    "$dynamicRef": _never,
    "$recursiveRef": _never,
}
