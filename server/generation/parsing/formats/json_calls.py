"""Calls as JSON objects: Hermes, Qwen 2.5 to 3, Phi and Granite."""

from collections.abc import Sequence

from server.generation.constraints.fragment import Fragment, sequence, text
from server.generation.parsing.call_grammar import GrammarBuilder, calls_in_text, json_objects, optional
from server.generation.parsing.json_text import json_call, json_calls
from server.generation.parsing.output_parser import Expected, calls_after
from server.generation.parsing.reader import WHITESPACE, Reader, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes:
    """Implements ToolFormat for Hermes and Qwen 2.5 to 3: a JSON object between tags."""

    name = "hermes"
    markers = (_BEGIN, _END)
    ends_reasoning = (_BEGIN,)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        return calls_after(reader, expected, (_BEGIN,), lambda _: _call(reader), WHITESPACE)

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        call = sequence(text("\n"), json_objects(builder), builder.text(f"\n{_END}"))
        return calls_in_text(builder, {_BEGIN: call}, "\n")


def _call(reader: Reader) -> Steps[bool]:
    yield from reader.skip()
    if not (yield from json_call(reader)):
        return False
    return (yield from reader.spaced_literal(_END)) is not None


class JsonList:
    """Implements ToolFormat: a list or a single object after a marker."""

    ends_reasoning = ()

    def __init__(self, name: str, begins: Sequence[str], ends: Sequence[str]) -> None:
        """`begins` are markers before a list; one of `ends` may follow it."""
        self.name = name
        self._begins = begins
        self._ends = ends
        self.markers = (*begins, *ends)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        return calls_after(reader, expected, self._begins, lambda _: self._calls(reader), WHITESPACE)

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        several = builder.several(json_objects(builder), ", ")
        calls = builder.rule(sequence(text("["), several, text("]"), optional(builder.text(self._ends[0]))))
        begins = sorted(self._begins, key=builder.is_control, reverse=True)
        return calls_in_text(builder, dict.fromkeys(begins, calls), None)

    def _calls(self, reader: Reader) -> Steps[bool]:
        yield from reader.skip()
        is_list = (yield from reader.need()) == "["
        if not (yield from (json_calls if is_list else json_call)(reader)):
            return False
        yield from reader.spaced_literal(*self._ends)
        return True


PHI = JsonList("phi", ("functools", "<|tool_call|>"), ("<|/tool_call|>",))
"""Phi-4 mini."""
GRANITE = JsonList("granite", ("<|tool_call|>", "<tool_call>"), ("</tool_call>",))
"""Granite up to 3.3. From 4 on, it uses the Hermes format."""
