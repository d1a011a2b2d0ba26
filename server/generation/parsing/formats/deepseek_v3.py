"""DeepSeek V3, R1 and V3.1: sections of calls, with the arguments as JSON."""

import re

from server.generation.constraints.fragment import Fragment, either, sequence, text
from server.generation.parsing.call_grammar import Wanted
from server.generation.parsing.call_sections import CallSections
from server.generation.parsing.json_text import json_object
from server.generation.parsing.output_parser import Expected, arguments
from server.generation.parsing.parts import CallBegin, CallEnd
from server.generation.parsing.reader import Reader, Steps

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE, _FENCE_END = "```json", "```"
_NAME = re.compile(r"[^\s<`{]*")
_SECTIONS = CallSections(begins=(_BEGIN,), ends=(_END,), calls=(_CALL,))


class DeepseekV3:
    """Implements ToolFormat."""

    name = "deepseek_v3"
    markers = (_BEGIN, _END, _CALL, _SEPARATOR, _CALL_END)
    ends_reasoning = (_BEGIN,)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        """See ToolFormat."""
        yield from _SECTIONS.read(reader, expected, _call)

    def grammar(self, wanted: Wanted) -> Fragment | None:
        """See ToolFormat."""
        arguments = [(tool.name, wanted.rule(tool.arguments())) for tool in wanted.tools]
        bare = [sequence(wanted.text(name + _SEPARATOR), given) for name, given in arguments]
        fenced = [sequence(text(f"{name}\n{_FENCE}\n"), given, text(f"\n{_FENCE_END}")) for name, given in arguments]
        typed = sequence(wanted.text(f"function{_SEPARATOR}"), either(*fenced))
        call = sequence(either(*bare, typed), wanted.text(_CALL_END))
        return _SECTIONS.grammar(wanted, call)


def _call(reader: Reader) -> Steps[bool]:
    """V3.1 writes `name<sep>{...}`; V3 writes a type there, and then the name and the arguments in a fence."""
    name = yield from reader.span(_NAME)
    if (yield from reader.literal(_SEPARATOR)) is None:
        return False
    fenced_name = yield from reader.span(_NAME)
    if fenced_name and (yield from reader.spaced_literal(_FENCE)) is None:
        return False
    if not name:
        return False
    yield CallBegin(fenced_name or name)
    if not (yield from json_object(reader, arguments)):
        return False
    if fenced_name and (yield from reader.spaced_literal(_FENCE_END)) is None:
        return False
    if (yield from reader.spaced_literal(_CALL_END)) is None:
        return False
    yield CallEnd()
    return True
