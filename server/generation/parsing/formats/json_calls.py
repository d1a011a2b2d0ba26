"""Calls as objects of JSON: Hermes, Qwen from 2.5 to 3, Phi and Granite."""

from collections.abc import Sequence

from server.generation.constraints.fragment import Fragment, sequence, text
from server.generation.parsing.call_grammar import Wanted, calls_in_text, json_objects, optional
from server.generation.parsing.json_text import json_call, json_calls
from server.generation.parsing.output_parser import Expected, calls_after
from server.generation.parsing.reader import WHITESPACE, Reader, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes:
    """Implements ToolFormat, for Hermes and Qwen from 2.5 to 3: an object between tags."""

    name = "hermes"
    markers = (_BEGIN, _END)
    ends_reasoning = (_BEGIN,)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        return calls_after(reader, expected, (_BEGIN,), lambda _: _call(reader), WHITESPACE)

    def grammar(self, wanted: Wanted) -> Fragment | None:
        call = sequence(text("\n"), json_objects(wanted), wanted.text(f"\n{_END}"))
        return calls_in_text(wanted, {_BEGIN: call}, "\n")


def _call(reader: Reader) -> Steps[bool]:
    yield from reader.skip()
    if not (yield from json_call(reader)):
        return False
    return (yield from reader.spaced_literal(_END)) is not None


class JsonList:
    """Implements ToolFormat: a list after a marker, or a single object."""

    ends_reasoning = ()

    def __init__(self, name: str, begins: Sequence[str], ends: Sequence[str]) -> None:
        """A list is after one of `begins`; one of `ends` may follow it."""
        self.name = name
        self._begins = begins
        self._ends = ends
        self.markers = (*begins, *ends)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        return calls_after(reader, expected, self._begins, lambda _: self._calls(reader), WHITESPACE)

    def grammar(self, wanted: Wanted) -> Fragment | None:
        several = wanted.several(json_objects(wanted), ", ")
        calls = wanted.rule(sequence(text("["), several, text("]"), optional(wanted.text(self._ends[0]))))
        begins = sorted(self._begins, key=wanted.is_control, reverse=True)
        return calls_in_text(wanted, dict.fromkeys(begins, calls), None)

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
"""Granite up to 3.3; from 4 on it writes as Hermes does."""
