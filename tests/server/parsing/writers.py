"""Calls as models write them, one writer for each way; they share nothing with the parsers."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Writer:
    """One way of writing calls."""

    format: str
    write: Callable[[Calls], str]
    begins_output: bool = False
    """Whether calls can only stand at the beginning of the output."""
    unsayable: re.Pattern[str] | None = None
    """What a value cannot contain, since values are written as plain text."""

    def sayable(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with nothing that cannot be written."""
        if self.unsayable is None:
            return arguments
        return {
            key: "said otherwise" if self.unsayable.search(plain(value)) else value for key, value in arguments.items()
        }


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_object(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return dumps({"name": name, key: arguments})


def json_list(calls: Calls) -> str:
    return f"[{', '.join(as_object(*call) for call in calls)}]"


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{as_object(*call)}\n</tool_call>" for call in calls)


def llama3_json(calls: Calls) -> str:
    return "; ".join(as_object(*call, key="parameters") for call in calls)


def qwen3_xml(calls: Calls) -> str:
    def write(name: str, arguments: dict[str, Any]) -> str:
        given = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"

    return "\n".join(write(*call) for call in calls)


def seed(calls: Calls) -> str:
    def write(name: str, arguments: dict[str, Any]) -> str:
        given = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
        return f"<seed:tool_call>\n<function={name}>\n{given}</function>\n</seed:tool_call>"

    return "\n".join(write(*call) for call in calls)


def glm(calls: Calls, between: str) -> str:
    def write(name: str, arguments: dict[str, Any]) -> str:
        tags = [
            f"<arg_key>{key}</arg_key>{between}<arg_value>{plain(value)}</arg_value>"
            for key, value in arguments.items()
        ]
        return f"<tool_call>{between.join([name, *tags])}{between}</tool_call>"

    return between.join(write(*call) for call in calls)


def pythonic(calls: Calls) -> str:
    def write(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return f"[{', '.join(write(*call) for call in calls)}]"


def mistral(calls: Calls, begin: str = "[ARGS]") -> str:
    return "".join(f"[TOOL_CALLS]{name}{begin}{dumps(arguments)}" for name, arguments in calls)


_IN_QWEN = re.compile(
    r"</parameter>\s*<(/function|parameter=|/(seed:)?tool_call)|\n<parameter=|</function>\s*</(seed:)?tool_call>"
)
_IN_SEED = re.compile(rf"^\n|{_IN_QWEN.pattern}")
_IN_GLM = re.compile(r"</arg_value>|</tool_call>\s*(<tool_call>|$)")
WRITERS = {
    "hermes": Writer("hermes", hermes),
    "qwen3_xml": Writer("qwen3_xml", qwen3_xml, unsayable=_IN_QWEN),
    "seed": Writer("qwen3_xml", seed, unsayable=_IN_SEED),
    "glm 4.5": Writer("glm", lambda calls: glm(calls, "\n"), unsayable=_IN_GLM),
    "glm 4.7": Writer("glm", lambda calls: glm(calls, ""), unsayable=_IN_GLM),
    "llama3_json": Writer("llama3_json", llama3_json, begins_output=True),
    "llama3_json with tag": Writer("llama3_json", lambda calls: "<|python_tag|>" + llama3_json(calls)),
    "pythonic": Writer("pythonic", pythonic, begins_output=True),
    "pythonic with tags": Writer("pythonic", lambda calls: f"<|python_start|>{pythonic(calls)}<|python_end|>"),
    "mistral v3": Writer("mistral", lambda calls: f"[TOOL_CALLS] {json_list(calls)}"),
    "mistral v11": Writer("mistral", mistral),
    "mistral with id": Writer("mistral", lambda calls: mistral(calls, "[CALL_ID]a1B2c3D4e[ARGS]")),
    "phi": Writer("phi", lambda calls: f"functools{json_list(calls)}"),
    "phi with tags": Writer("phi", lambda calls: f"<|tool_call|>{json_list(calls)}<|/tool_call|>"),
    "granite": Writer("granite", lambda calls: f"<|tool_call|>{json_list(calls)}"),
    "granite 3.1": Writer("granite", lambda calls: f"<tool_call>{json_list(calls)}"),
}
