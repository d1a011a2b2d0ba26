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
    can_say: Callable[[Any], bool] = lambda _: True
    """Whether a value can be written."""
    structure: str = "(?!)"
    """A regular expression for markup that is never text."""

    def sayable(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with nothing that cannot be written."""
        return {key: value if self.can_say(value) else "said otherwise" for key, value in arguments.items()}


def without(pattern: str) -> Callable[[Any], bool]:
    """Values are written as plain text, and cannot contain this."""
    return lambda value: re.search(pattern, plain(value)) is None


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


def deepseek_v3(calls: Calls) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    written = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def dsml(section: str, space: str) -> Callable[[Calls], str]:
    def parameter(key: str, value: Any) -> str:
        is_string = isinstance(value, str)
        written = value if is_string else dumps(value)
        flag = "true" if is_string else "false"
        return f'<｜DSML｜{space}parameter name="{key}" string="{flag}">{written}</｜DSML｜{space}parameter>\n'

    def write(calls: Calls) -> str:
        written = [
            f'<｜DSML｜{space}invoke name="{name}">\n'
            + "".join(parameter(key, value) for key, value in arguments.items())
            + f"</｜DSML｜{space}invoke>\n"
            for name, arguments in calls
        ]
        return f"\n\n<｜DSML｜{section}>\n{''.join(written)}</｜DSML｜{section}>"

    return write


def dsml_writer(section: str, space: str) -> Writer:
    return Writer(
        "deepseek_dsml",
        dsml(section, space),
        can_say=without(f"</｜DSML｜{space}parameter>"),
        structure=rf"</?｜DSML｜{space}\w*>|\n",
    )


def kimi_k2(calls: Calls) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def kimi_k3(calls: Calls) -> str:
    def element(name: str, inside: str, attributes: str = "") -> str:
        return f"<|open|>{name}{attributes}<|sep|>{inside}<|close|>{name}<|sep|>"

    def argument(key: str, value: Any) -> str:
        kinds = {str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array"}
        key = key.replace("&", "&amp;").replace('"', "&quot;")
        attributes = f' key="{key}" type="{kinds.get(type(value), "number")}"'
        return element("argument", value if isinstance(value, str) else json.dumps(value), attributes)

    written = "".join(
        element(
            "call",
            "".join(argument(key, value) for key, value in arguments.items()),
            f' tool="{name}" index="{number}"',
        )
        for number, (name, arguments) in enumerate(calls, 1)
    )
    return f"<|close|>response<|sep|>{element('tools', written)}<|close|>message<|sep|>"


def gemma4(calls: Calls) -> str:
    def notation(value: Any) -> str:
        match value:
            case str():
                return f'<|"|>{value}<|"|>'
            case dict():
                return "{" + ",".join(f"{key}:{notation(inner)}" for key, inner in value.items()) + "}"
            case list():
                return "[" + ",".join(map(notation, value)) + "]"
            case _:
                return json.dumps(value)

    return "".join(f"<|tool_call>call:{name}{notation(arguments)}<tool_call|>" for name, arguments in calls)


def gemma4_can_say(value: Any) -> bool:
    match value:
        case str():
            return '<|"|>' not in value
        case dict():
            return all(re.fullmatch(r"\w*", key) and gemma4_can_say(inner) for key, inner in value.items())
        case list():
            return all(map(gemma4_can_say, value))
        case _:
            return True


def harmony(header: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        messages = [
            f"<|start|>assistant{header.format(name)} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
            for name, arguments in calls
        ]
        return "".join(messages)

    return write


_IN_QWEN = r"</parameter>\s*<(/function|parameter=|/(seed:)?tool_call)|\n<parameter=|</function>\s*</(seed:)?tool_call>"
_IN_GLM = r"</arg_value>|</tool_call>\s*(<tool_call>|$)"
_HARMONY_HEADER = (
    r"(?:<\|start\|>(?:assistant)?|^)(?: ?to=[^\s<]+)?"
    r"(?:<\|channel\|>[^\s<]*(?: to=[^\s<]+)?(?: ?<\|constrain\|>[^\s<]*| [^\s<]+)?)*<\|message\|>"
    r"|<\|(?:end|call|return)\|>"
)
WRITERS = {
    "hermes": Writer("hermes", hermes),
    "qwen3_xml": Writer("qwen3_xml", qwen3_xml, can_say=without(_IN_QWEN)),
    "seed": Writer("qwen3_xml", seed, can_say=without(rf"^\n|{_IN_QWEN}")),
    "glm 4.5": Writer("glm", lambda calls: glm(calls, "\n"), can_say=without(_IN_GLM)),
    "glm 4.7": Writer("glm", lambda calls: glm(calls, ""), can_say=without(_IN_GLM)),
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
    "deepseek_v3": Writer("deepseek_v3", deepseek_v3, structure="<｜tool▁calls▁(begin|end)｜>"),
    "deepseek_v3.1": Writer("deepseek_v3", deepseek_v31, structure="<｜tool▁calls▁(begin|end)｜>"),
    "deepseek_v3.2": dsml_writer("function_calls", ""),
    "deepseek_v4": dsml_writer("tool_calls", ""),
    "deepseek_v4.1": dsml_writer(" calls", " "),
    "kimi_k2": Writer("kimi_k2", kimi_k2, structure=r"<\|tool_calls_section_(begin|end)\|>"),
    "kimi_k3": Writer(
        "kimi_k3",
        kimi_k3,
        can_say=without(r"<\|close\|>argument<\|sep\|>"),
        structure=r"<\|\w*\|>|think|response|tools|message",
    ),
    "gemma4": Writer("gemma4", gemma4, can_say=gemma4_can_say),
    "harmony": Writer("harmony", harmony(" to=functions.{}<|channel|>commentary"), structure=_HARMONY_HEADER),
    "harmony, to after the channel": Writer(
        "harmony", harmony("<|channel|>commentary to=functions.{}"), structure=_HARMONY_HEADER
    ),
    "harmony, begun by the prompt": Writer(
        "harmony",
        lambda calls: harmony("<|channel|>commentary to=functions.{}")(calls).removeprefix("<|start|>assistant"),
        begins_output=True,
        structure=_HARMONY_HEADER,
    ),
}
