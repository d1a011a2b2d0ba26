"""Kimi K2: sections of calls, each of which is known by an id that holds the name."""

import re

from server.generation.constraints.fragment import Fragment, either, sequence, text
from server.generation.parsing.call_grammar import Wanted
from server.generation.parsing.call_sections import CallSections
from server.generation.parsing.json_text import json_object
from server.generation.parsing.output_parser import Expected, arguments
from server.generation.parsing.parts import CallBegin, CallEnd
from server.generation.parsing.reader import Reader, Steps

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"[^\s<]*")
_NAME_IN_ID = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]*)?")
_NUMBER = Fragment("/[0-9]{1,4}/")
_SECTIONS = CallSections(begins=(_BEGIN,), ends=(_END,), calls=(_CALL,))


class KimiK2:
    """Implements ToolFormat."""

    name = "kimi_k2"
    markers = (_BEGIN, _END, _CALL, _ARGUMENTS, _CALL_END)
    ends_reasoning = (_BEGIN,)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        """See ToolFormat."""
        yield from _SECTIONS.read(reader, expected, _call)

    def grammar(self, wanted: Wanted) -> Fragment | None:
        """See ToolFormat."""
        calls = [
            sequence(text(f"functions.{tool.name}:"), _NUMBER, wanted.text(_ARGUMENTS), tool.arguments())
            for tool in wanted.tools
        ]
        return _SECTIONS.grammar(wanted, sequence(either(*calls), wanted.text(_CALL_END)))


def _call(reader: Reader) -> Steps[bool]:
    yield from reader.skip()
    call_id = yield from reader.span(_ID)
    named = _NAME_IN_ID.fullmatch(call_id)
    if named is None or (yield from reader.spaced_literal(_ARGUMENTS)) is None:
        return False
    yield CallBegin(named[1], call_id)
    if not (yield from json_object(reader, arguments)):
        return False
    if (yield from reader.spaced_literal(_CALL_END)) is None:
        return False
    yield CallEnd()
    return True
