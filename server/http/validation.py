"""Turns pydantic's errors about a body into the one error that OpenAI would return."""

from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import InvalidRequestError, shorten

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a decimal",
    "bool_type": "a boolean",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "union_tag_not_found": "a string or an array",
    "string_or_object_type": "a string or an object",
}
_RELATIONS = {
    "less_than_equal": ("le", "above", "maximum", "<="),
    "less_than": ("lt", "above", "maximum", "<"),
    "greater_than_equal": ("ge", "below", "minimum", ">="),
    "greater_than": ("gt", "below", "minimum", ">"),
}
_NO_BRACKETS = str.maketrans("", "", "<>")
_UNSUPPORTED_MESSAGES = {
    "unsupported_parameter": "Unsupported parameter: '{path}' is not supported by this server.",
    "unsupported_value": "Unsupported value: '{path}' does not support {value} with this server.",
}


def from_validation(errors: Sequence[Mapping[str, Any]]) -> InvalidRequestError:
    """The first of pydantic's errors as an API error.

    Tags of unions (written `<tag>`) are not part of its path. Long input is not repeated.
    """
    error = errors[0]
    path = json_path(error["loc"])
    kind = error["type"]
    context = error.get("ctx", {})
    if "problem" in context:  # raised by our own validators with `rules.problem`
        path = _join(path, context["field"])
        return InvalidRequestError(context["problem"].replace("{path}", path), param=path or None, code=kind)
    if kind in _UNSUPPORTED_MESSAGES:
        message = _UNSUPPORTED_MESSAGES[kind].format(path=path, value=_describe(error["input"]))
        return InvalidRequestError(message, param=path or None, code=kind)
    if kind == "union_tag_invalid":
        return _unknown_type(_join(path, "type"), error["input"].get("type"), context["expected_tags"])
    message, code = _explain(kind, path, context, error["input"], error["msg"])
    return InvalidRequestError(message, param=path or None, code=code)


def _unknown_type(path: str, value: object, tags: str) -> InvalidRequestError:
    """The error for an object with an unknown `type`. A tag with a space stands for types that are only ignored."""
    expected = {"expected": ", ".join(tag for tag in tags.split(", ") if " " not in tag).translate(_NO_BRACKETS)}
    kind = "missing" if value is None else "literal_error" if isinstance(value, str) else "string_type"
    message, code = _explain(kind, path, expected, value, "")
    return InvalidRequestError(message, param=path, code=code)


def json_path(location: Sequence[str | int]) -> str:
    """("messages", 2, "<user>", "content") becomes "messages[2].content"."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<") and step != "[key]":
            path = _join(path, shorten(step))
    return path


def _join(path: str, step: str) -> str:
    return f"{path}.{step}" if path and step else path or step


def _explain(kind: str, path: str, context: Mapping[str, Any], value: object, default: str) -> tuple[str, str]:
    """Message and code for an error that pydantic itself found."""
    if kind == "missing":
        return f"Missing required parameter: '{path}'.", "missing_required_parameter"
    if kind == "float_type" and isinstance(value, int) and not isinstance(value, bool):
        return f"Invalid '{path}': the number is too large for a decimal.", "decimal_above_max_value"
    if kind in _EXPECTED:
        where = f" for '{path}'" if path else " for the request body"
        return f"Invalid type{where}: expected {_EXPECTED[kind]}, but got {_kind_of(value)} instead.", "invalid_type"
    if kind in _RELATIONS:
        return _out_of_range(kind, path, context, value)
    if kind in {"too_long", "too_short"}:
        return _wrong_length(kind, path, context)
    if kind in {"string_too_long", "string_too_short"}:
        return _wrong_string_length(kind, path, context, value)
    if kind == "literal_error":
        message = f"Invalid value: {_describe(value)}. Supported values are: {context['expected']}."
        return message, "invalid_value"
    return f"Invalid '{path}': {default}.", "invalid_value"


def no_body() -> InvalidRequestError:
    """The error for a body that is empty or null."""
    return InvalidRequestError("The request has no body: send a JSON object.", code="missing_required_parameter")


def _out_of_range(kind: str, path: str, context: Mapping[str, Any], value: object) -> tuple[str, str]:
    key, side, bound, sign = _RELATIONS[kind]
    limit = context[key]
    number = "decimal" if isinstance(limit, float) else "integer"
    shown = f"{limit:g}" if isinstance(limit, float) else str(limit)
    message = (
        f"Invalid '{path}': {number} {side} {bound} value. "
        f"Expected a value {sign} {shown}, but got {_describe(value)} instead."
    )
    return message, f"{number}_{side}_{'max' if bound == 'maximum' else 'min'}_value"


def _wrong_length(kind: str, path: str, context: Mapping[str, Any]) -> tuple[str, str]:
    length = context["actual_length"]
    if context["field_type"] == "Dictionary":
        expected = f"Expected an object with at most {context['max_length']} properties"
        message = f"Invalid '{path}': too many properties. {expected}, but got {length} properties instead."
        return message, "object_above_max_properties"
    if kind == "too_long":
        expected = f"Expected an array with maximum length {context['max_length']}"
        length = "more" if length is None else f"an array with length {length}"
        return f"Invalid '{path}': array too long. {expected}, but got {length} instead.", "array_above_max_length"
    expected = f"Expected an array with minimum length {context['min_length']}"
    if length:
        message = f"Invalid '{path}': array too short. {expected}, but got an array with length {length} instead."
        return message, "array_below_min_length"
    return f"Invalid '{path}': empty array. {expected}, but got an empty array instead.", "empty_array"


def _wrong_string_length(kind: str, path: str, context: Mapping[str, Any], value: object) -> tuple[str, str]:
    length = len(value) if isinstance(value, str) else 0
    got = f"but got a string with length {length} instead."
    if kind == "string_too_long":
        expected = f"Expected a string with maximum length {context['max_length']}"
        return f"Invalid '{path}': string too long. {expected}, {got}", "string_above_max_length"
    expected = f"Expected a string with minimum length {context['min_length']}"
    return f"Invalid '{path}': string too short. {expected}, {got}", "string_below_min_length"


def _kind_of(value: object) -> str:
    """JSON's name for the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names: dict[type, str] = {int: "an integer", float: "a decimal", str: "a string", list: "an array"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "an object")


def _describe(value: object) -> str:
    """A value for a message: short, and never a structure."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "a very large integer"
    if isinstance(value, str):
        return f"'{shorten(value)}'"
    return f"{value:g}" if isinstance(value, float) else _kind_of(value)
