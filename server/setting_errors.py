"""Errors of settings in the words of a user: what a value should have been, and which settings go together."""

import difflib
import re
from collections.abc import Iterable

from pydantic_core import ErrorDetails, PydanticCustomError

PREFIX = "SAMEWISE_"
"""Start of the variables that are settings."""
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
"""Start of SAMEWISE_PORT=tcp://10.0.0.1:8000, which Kubernetes sets if there is a Service named samewise."""
_EXPECTED = {
    "int_": "expected a whole number",
    "float_": "expected a number",
    "finite_number": "expected a finite number",
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be more than {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "bool_": "expected true or false",
    "string_type": "expected text; in a YAML file put it in quotes",
    "path_type": "expected a path",
    "tuple_type": "expected a list",
    "model_type": "expected keys and values such as `name: small`",
}
"""The expected value, by the start of the type of pydantic's error."""


class SettingsError(ValueError):
    """A setting cannot be used. The message is one line that names the setting, its source and its value."""


def describe_value_error(error: ErrorDetails) -> str:
    """Say what a value should have been, without the value, in the words of a user rather than of pydantic."""
    kind, limits = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        near = difflib.get_close_matches(str(error["input"]), str(limits["expected"]).split("'")[1::2], n=1, cutoff=0.7)
        return f"expected {limits['expected']}" + (f"; did you mean '{near[0]}'?" if near else "")
    if kind == "missing":
        return "is required"
    for start, text in _EXPECTED.items():
        if kind.startswith(start):
            return text.format_map(limits)
    return f"{error['msg'][0].lower()}{error['msg'][1:]}"


def unknown_setting(key: str, known: Iterable[str], advice: str = "") -> str:
    """Say that a key is unknown, with the settings that are spelt almost like it, otherwise with this advice."""
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=3, cutoff=0.6)
    meant = f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else advice
    return f"unknown setting `{key}`{meant}"


def missing_setting(name: str, other: str) -> PydanticCustomError:
    """The error for a setting that has no effect without another one."""
    message = "{name} needs {other}. Set {other} too, or leave {name} out"
    return PydanticCustomError("missing_setting", message, {"name": name, "other": other})


def setting_error(name: str, message: str) -> PydanticCustomError:
    """An error of a setting that is found together with others. The message follows the place where it is set."""
    return PydanticCustomError("setting_error", "{message}", {"message": message, "setting": name})


def service_link_advice(source: str, value: object) -> str:
    """Advice if Kubernetes has set the variable, not the user."""
    if source != PREFIX + "PORT" or not _SERVICE_LINK.match(str(value)):
        return ""
    return (
        "; Kubernetes sets it for a Service named samewise: put `enableServiceLinks: false` into the pod's "
        "specification, or rename the Service"
    )
