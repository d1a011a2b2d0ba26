"""Reading Python's literals, and passing them on as JSON."""

import json
import re

from server.generation.parsing.emit import Emit
from server.generation.parsing.json_text import Notation, escaped
from server.generation.parsing.reader import Reader, Steps

_QUOTES = "'\""
_PLAIN = re.compile(r"[^'\"\\\x00-\x1f]+")
_CODE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U(?:000[0-9a-fA-F]|0010)[0-9a-fA-F]{4})")
_BEGUN_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?\Z")
_ESCAPES = dict(zip("ntrbfav0\\'\"\n", [*"\n\t\r\b\f\a\v\0\\'\"", ""], strict=True))
_NAMED = re.compile(r"\\[ntrbfav0\\'\"\n]")


def python_string(reader: Reader, emit: Emit) -> Steps[bool]:
    """Read a string in either kind of quotes. What is no escape in Python is a backslash, as it is there."""
    quote = yield from reader.need()
    if not quote or quote not in _QUOTES:
        return False
    reader.take(1)
    yield from emit('"')
    while first := (yield from reader.need()):
        if first == quote:
            reader.take(1)
            yield from emit('"')
            return True
        if plain := reader.match(_PLAIN):
            yield from emit(escaped(reader.take(len(plain))))
        elif first != "\\":
            yield from emit(escaped(reader.take(1)))
        elif not (reader.match(_BEGUN_ESCAPE) and (yield from reader.more())):
            yield from emit(_escape(reader))
    return False


def _escape(reader: Reader) -> str:
    """Read a backslash and what belongs to it, all of which is known."""
    if code := reader.match(_CODE):
        return json.dumps(chr(int(reader.take(len(code))[2:], 16)))[1:-1]
    if reader.match(_NAMED):
        return escaped(_ESCAPES[reader.take(2)[1]])
    return escaped(reader.take(1))


PYTHON = Notation(_QUOTES, python_string, python_string, {"True": "true", "False": "false", "None": "null"})
