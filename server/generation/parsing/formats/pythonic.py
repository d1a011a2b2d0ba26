"""Llama 3.2 and 4, as their makers advise: a list of calls as Python writes them, with literals as arguments."""

from server.generation.constraints.fragment import Fragment
from server.generation.parsing.call_grammar import Wanted
from server.generation.parsing.json_text import json_value
from server.generation.parsing.members import Members
from server.generation.parsing.names import NAME
from server.generation.parsing.output_parser import Expected, arguments, content
from server.generation.parsing.parts import CallBegin, CallEnd
from server.generation.parsing.python_text import PYTHON
from server.generation.parsing.reader import Reader, Steps

_TAG, _BEGIN, _END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


class Pythonic:
    """Implements ToolFormat. Without a marker before it, only a list that the output begins with is one of calls."""

    name = "pythonic"
    markers = (_TAG, _BEGIN, _END)
    ends_reasoning = ()

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        """See ToolFormat."""
        before: str | None = yield from reader.skip()
        while before is not None:
            yield from reader.attempt(before, _calls(reader), emit=content, at_once=expected.calls_are_whole)
            before = yield from reader.until(_TAG, _BEGIN, emit=content)

    def grammar(self, wanted: Wanted) -> Fragment | None:
        """See ToolFormat. Not known yet."""
        return None


def _calls(reader: Reader) -> Steps[bool]:
    if (yield from reader.spaced_literal("[")) is None:
        return False
    if not (yield from reader.items(lambda: _call(reader), "]")):
        return False
    yield from reader.spaced_literal(_END)
    return True


def _call(reader: Reader) -> Steps[bool]:
    tool = yield from reader.span(NAME)
    if not tool or (yield from reader.literal("(")) is None:
        return False
    yield CallBegin(tool)
    members = Members()
    has_arguments = (yield from reader.spaced_literal(")")) is None
    if has_arguments and not (yield from reader.items(lambda: _argument(reader, members), ")")):
        return False
    yield from members.end()
    yield CallEnd()
    return True


def _argument(reader: Reader, members: Members) -> Steps[bool]:
    key = yield from reader.span(NAME)
    if not key or (yield from reader.spaced_literal("=")) is None or not (yield from members.begin(key)):
        return False
    return (yield from json_value(reader, arguments, PYTHON))
