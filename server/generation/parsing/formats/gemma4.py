"""Gemma 4: calls in an object notation of their own."""

import re

from server.generation.parsing.json_text import json_value
from server.generation.parsing.members import Members, in_quotes, quoted
from server.generation.parsing.output_parser import Expected, arguments, content
from server.generation.parsing.parts import CallArguments, CallBegin, CallEnd
from server.generation.parsing.reader import Reader, Steps

_BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[^\s<{]*")
_KEY = re.compile(r"[^:<]*")
_MOST_NESTED = 64


class Gemma4:
    """Implements ToolFormat."""

    name = "gemma4"
    markers = (_BEGIN, _END, _QUOTE)
    ends_reasoning = (_BEGIN,)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        """See ToolFormat."""
        while (before := (yield from reader.until(_BEGIN, emit=content))) is not None:
            yield from reader.attempt(before, _call(reader), emit=content, at_once=expected.calls_are_whole)


def _call(reader: Reader) -> Steps[bool]:
    if (yield from reader.literal("call:")) is None:
        return False
    name = yield from reader.span(_NAME)
    if not name or (yield from reader.literal("{")) is None:
        return False
    yield CallBegin(name)
    if not (yield from _members(reader, 1)):
        return False
    if (yield from reader.spaced_literal(_END)) is None:
        return False
    yield CallEnd()
    return True


def _members(reader: Reader, depth: int) -> Steps[bool]:
    """Read an object from after its bracket. Keys stand bare."""
    members = Members()
    yield from reader.skip()
    following = yield from reader.literal("}")
    while following != "}":
        key = yield from reader.span(_KEY)
        if (yield from reader.literal(":")) is None or not (yield from members.begin(key.strip())):
            return False
        if not (yield from _value(reader, depth)):
            return False
        yield from reader.skip()
        if (following := (yield from reader.literal(",", "}"))) is None:
            return False
    yield from members.end()
    return True


def _items(reader: Reader, depth: int) -> Steps[bool]:
    """Read an array from after its bracket."""
    yield CallArguments("[")
    yield from reader.skip()
    following = yield from reader.literal("]")
    while following != "]":
        if not (yield from _value(reader, depth)):
            return False
        yield from reader.skip()
        if (following := (yield from reader.literal(",", "]"))) is None:
            return False
        if following == ",":
            yield CallArguments(", ")
    yield CallArguments("]")
    return True


def _value(reader: Reader, depth: int) -> Steps[bool]:
    """Read a value. Strings stand raw in quotes that are tokens; all other scalars are as in JSON."""
    yield from reader.skip()
    begin = yield from reader.literal(_QUOTE, "{", "[")
    if begin is None:
        return (yield from json_value(reader, arguments))
    if begin == _QUOTE:
        return (yield from quoted(reader.until(_QUOTE, emit=in_quotes)))
    if depth == _MOST_NESTED:
        return False
    return (yield from (_members if begin == "{" else _items)(reader, depth + 1))
