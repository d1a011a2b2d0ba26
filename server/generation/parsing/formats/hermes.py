"""Hermes, and Qwen from 2.5 to 3: a JSON object between tags."""

from server.generation.constraints.fragment import Fragment, sequence, text
from server.generation.parsing.call_grammar import Wanted, calls_in_text, json_objects
from server.generation.parsing.json_call import json_call
from server.generation.parsing.output_parser import Expected, content
from server.generation.parsing.reader import WHITESPACE, Reader, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes:
    """Implements ToolFormat."""

    name = "hermes"
    markers = (_BEGIN, _END)
    ends_reasoning = (_BEGIN,)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        """See ToolFormat."""
        while (before := (yield from reader.until(_BEGIN, emit=content, trim=WHITESPACE))) is not None:
            yield from reader.attempt(before, _call(reader), emit=content, at_once=expected.calls_are_whole)

    def grammar(self, wanted: Wanted) -> Fragment | None:
        """See ToolFormat."""
        call = sequence(text("\n"), json_objects(wanted), wanted.text(f"\n{_END}"))
        return calls_in_text(wanted, {_BEGIN: call}, "\n")


def _call(reader: Reader) -> Steps[bool]:
    yield from reader.skip()
    if not (yield from json_call(reader)):
        return False
    return (yield from reader.spaced_literal(_END)) is not None
