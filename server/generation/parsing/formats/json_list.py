"""Phi and Granite: a list of calls as JSON after a marker."""

from collections.abc import Sequence

from server.generation.constraints.fragment import Fragment, sequence, text
from server.generation.parsing.call_grammar import Wanted, calls_in_text, json_objects, optional
from server.generation.parsing.json_call import json_call, json_calls
from server.generation.parsing.output_parser import Expected, content
from server.generation.parsing.reader import WHITESPACE, Reader, Steps


class JsonList:
    """Implements ToolFormat. A single call may stand there without a list."""

    ends_reasoning = ()

    def __init__(self, name: str, begins: Sequence[str], ends: Sequence[str]) -> None:
        """A list is after one of `begins`; one of `ends` may follow it."""
        self.name = name
        self._begins = begins
        self._ends = ends
        self.markers = (*begins, *ends)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        """See ToolFormat."""
        while (before := (yield from reader.until(*self._begins, emit=content, trim=WHITESPACE))) is not None:
            yield from reader.attempt(before, self._calls(reader), emit=content, at_once=expected.calls_are_whole)

    def grammar(self, wanted: Wanted) -> Fragment | None:
        """See ToolFormat."""
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
