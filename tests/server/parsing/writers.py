"""Outputs of DeepSeek, Kimi, Gemma 4 and gpt-oss, written by what is to be read, and by no code of the parser."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.generation.parsing.formats.deepseek_dsml import DeepseekDsml
from server.generation.parsing.formats.deepseek_v3 import DeepseekV3
from server.generation.parsing.formats.gemma4 import Gemma4
from server.generation.parsing.formats.harmony import Harmony
from server.generation.parsing.formats.kimi_k2 import KimiK2
from server.generation.parsing.formats.kimi_k3 import KimiK3
from server.generation.parsing.output_parser import ToolFormat

Calls = list[tuple[str, dict[str, Any]]]
"""Names and arguments."""


def deepseek_v3(text: str, calls: Calls) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return text + "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def deepseek_v31(text: str, calls: Calls) -> str:
    written = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments, ensure_ascii=False)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return text + "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def dsml(section: str, space: str) -> Callable[[str, Calls], str]:
    def parameter(key: str, value: Any) -> str:
        is_string = isinstance(value, str)
        written = value if is_string else json.dumps(value, ensure_ascii=False)
        flag = "true" if is_string else "false"
        return f'<｜DSML｜{space}parameter name="{key}" string="{flag}">{written}</｜DSML｜{space}parameter>\n'

    def write(text: str, calls: Calls) -> str:
        written = [
            f'<｜DSML｜{space}invoke name="{name}">\n'
            + "".join(parameter(key, value) for key, value in arguments.items())
            + f"</｜DSML｜{space}invoke>\n"
            for name, arguments in calls
        ]
        return f"{text}\n\n<｜DSML｜{section}>\n{''.join(written)}</｜DSML｜{section}>"

    return write


def kimi_k2(text: str, calls: Calls) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    ]
    return text + "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def kimi_k3(text: str, calls: Calls) -> str:
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
    return f"{text}<|close|>response<|sep|>{element('tools', written)}<|close|>message<|sep|>"


def gemma4(text: str, calls: Calls) -> str:
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

    return text + "".join(f"<|tool_call>call:{name}{notation(arguments)}<tool_call|>" for name, arguments in calls)


def harmony(is_in_role: bool) -> Callable[[str, Calls], str]:
    def write(text: str, calls: Calls) -> str:
        messages = [f"<|channel|>commentary<|message|>{text}<|end|>"]
        for name, arguments in calls:
            to = f" to=functions.{name}"
            header = f"{to}<|channel|>commentary" if is_in_role else f"<|channel|>commentary{to}"
            messages.append(f"{header} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>")
        return "<|start|>assistant".join(messages)

    return write


@dataclass
class Family:
    write: Callable[[str, Calls], str]
    tools: ToolFormat
    raw_end: str = ""
    """What no string can hold."""
    has_ids: bool = False
    structure: str = "(?!)"
    """What is no text, wherever it stands."""


HARMONY_HEADER = (
    r"(?:<\|start\|>(?:assistant)?|^)(?: ?to=[^\s<]+)?"
    r"(?:<\|channel\|>[^\s<]*(?: to=[^\s<]+)?(?: ?<\|constrain\|>[^\s<]*| [^\s<]+)?)*<\|message\|>"
    r"|<\|(?:end|call|return)\|>"
)
FAMILIES = {
    "deepseek_v3": Family(deepseek_v3, DeepseekV3(), structure="<｜tool▁calls▁(begin|end)｜>"),
    "deepseek_v31": Family(deepseek_v31, DeepseekV3(), structure="<｜tool▁calls▁(begin|end)｜>"),
    "deepseek_v32": Family(
        dsml("function_calls", ""), DeepseekDsml(), "</｜DSML｜parameter>", structure=r"</?｜DSML｜\w*>|\n"
    ),
    "deepseek_v4": Family(
        dsml("tool_calls", ""), DeepseekDsml(), "</｜DSML｜parameter>", structure=r"</?｜DSML｜\w*>|\n"
    ),
    "deepseek_v41": Family(
        dsml(" calls", " "), DeepseekDsml(), "</｜DSML｜ parameter>", structure=r"</?｜DSML｜ \w*>|\n"
    ),
    "kimi_k2": Family(kimi_k2, KimiK2(), has_ids=True, structure=r"<\|tool_calls_section_(begin|end)\|>"),
    "kimi_k3": Family(
        kimi_k3, KimiK3(), "<|close|>argument<|sep|>", structure=r"<\|\w*\|>|think|response|tools|message"
    ),
    "gemma4": Family(gemma4, Gemma4(), '<|"|>'),
    "harmony_role": Family(harmony(True), Harmony(), structure=HARMONY_HEADER),
    "harmony_channel": Family(harmony(False), Harmony(), structure=HARMONY_HEADER),
}
"""Formats, and their variants."""
