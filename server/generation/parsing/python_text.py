"""Reading Python's literals, and passing them on as JSON."""

import json
import re

from server.generation.parsing.json_text import Notation, escaped
from server.generation.parsing.reader import Emit, Reader, Steps

_QUOTES = "'\""
_PLAIN = re.compile(r"[^'\"\\\x00-\x1f]+")
_CODE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U(?:000[0-9a-fA-F]|0010)[0-9a-fA-F]{4})")
_BEGUN_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
_ESCAPES = dict(zip("ntrbfav0\\'\"\n", [*"\n\t\r\b\f\a\v\0\\'\"", ""], strict=True))


def python_string(reader: Reader, emit: Emit) -> Steps[bool]:
    """Read a string in either kind of quotes. What is no escape in Python is a backslash, as it is there."""
    quote = yield from reader.need()
    if not quote or quote not in _QUOTES:
        return False
    reader.take(1)
    yield from emit('"')
    while (yield from reader.need()):
        text = reader.known
        if text[0] == quote:
            reader.take(1)
            yield from emit('"')
            return True
        if plain := _PLAIN.match(text):
            yield from emit(escaped(reader.take(plain.end())))
        elif text[0] != "\\":
            yield from emit(escaped(reader.take(1)))
        elif not (_BEGUN_ESCAPE.fullmatch(text) and (yield from reader.more())):
            yield from emit(_escape(reader))
    return False


def _escape(reader: Reader) -> str:
    """Read a backslash and what belongs to it, all of which is known."""
    if code := _CODE.match(reader.known):
        return json.dumps(chr(int(reader.take(code.end())[2:], 16)))[1:-1]
    if reader.known[1:2] in _ESCAPES and len(reader.known) > 1:
        return escaped(_ESCAPES[reader.take(2)[1]])
    return escaped(reader.take(1))


PYTHON = Notation(_QUOTES, python_string, {"True": "true", "False": "false", "None": "null"})
