"""Incremental reading of JSON and of Python literals as JSON, and of calls that are JSON objects."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from server.generation.parsing.parts import CallArguments, CallBegin, CallEnd, Emit, Kept, arguments, nowhere
from server.generation.parsing.reader import WHITESPACE, Reader, Steps, result

_MOST_NESTED = 256
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR = re.compile(r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null)")
_IN_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Notation:
    """A data notation whose brackets, commas and colons are as in JSON."""

    quotes: str
    """Characters that begin a string."""
    string: Callable[[Reader, Emit], Steps[bool]]
    """Reads a string and emits it as JSON."""
    key: Callable[[Reader, Emit], Steps[bool]]
    """Reads a member's key and emits it as JSON."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Named values: the notation's name to JSON's."""


def json_value(reader: Reader, emit: Emit, notation: Notation | None = None) -> Steps[bool]:
    """Read one JSON value and emit its text as it comes; False at the first invalid character.

    Raw control characters in a string, as models write line breaks, are emitted escaped. Whitespace before the value is
    dropped.

    Args:
        reader: the output.
        emit: gets the text.
        notation: of the value, if it is not JSON; the text is emitted as JSON.
    """
    notation = notation or _JSON
    open_brackets: list[str] = []
    while True:
        if not (yield from _value_or_bracket(reader, emit, open_brackets, notation)):
            return False
        if (closed := (yield from _after_value(reader, emit, open_brackets, notation))) is not None:
            return closed


def json_object(reader: Reader, emit: Emit) -> Steps[bool]:
    """Read one JSON object; otherwise like `json_value`."""
    yield from reader.skip()
    if (yield from reader.need()) != "{":
        return False
    return (yield from json_value(reader, emit))


def whole_value(text: str, notation: Notation | None = None) -> str | None:
    """The text as JSON if it is exactly one value, otherwise None."""
    reader = Reader()
    reader.feed(text)
    reader.end(is_cut=False)
    kept = Kept()
    if not result(json_value(reader, kept, notation)):
        return None
    result(reader.skip())
    return None if result(reader.need()) else kept.text


def _value_or_bracket(reader: Reader, emit: Emit, open_brackets: list[str], notation: Notation) -> Steps[bool]:
    """Read up to the end of the first complete value: a scalar, a string, or an empty collection."""
    while True:
        yield from _skip(reader, emit if open_brackets else nowhere)
        first = yield from reader.need()
        if first and first in notation.quotes:
            return (yield from notation.string(reader, emit))
        if first not in ("{", "["):
            return (yield from _scalar(reader, emit, notation.names))
        if len(open_brackets) == _MOST_NESTED:
            return False
        open_brackets.append("}" if first == "{" else "]")
        yield from emit(reader.take(1))
        yield from _skip(reader, emit)
        if (yield from reader.need()) == open_brackets[-1]:
            open_brackets.pop()
            yield from emit(reader.take(1))
            return True
        if first == "{" and not (yield from _key(reader, emit, notation)):
            return False


def _after_value(reader: Reader, emit: Emit, open_brackets: list[str], notation: Notation) -> Steps[bool | None]:
    """Read from a value to the next one. Returns True if all brackets are closed, False for invalid JSON."""
    while open_brackets:
        yield from _skip(reader, emit)
        next_one = yield from reader.need()
        if next_one == ",":
            yield from emit(reader.take(1))
            if open_brackets[-1] == "]":
                return None
            yield from _skip(reader, emit)
            return None if (yield from _key(reader, emit, notation)) else False
        if next_one != open_brackets[-1]:
            return False
        open_brackets.pop()
        yield from emit(reader.take(1))
    return True


def _key(reader: Reader, emit: Emit, notation: Notation) -> Steps[bool]:
    if not (yield from notation.key(reader, emit)):
        return False
    yield from _skip(reader, emit)
    if (yield from reader.need()) != ":":
        return False
    yield from emit(reader.take(1))
    return True


def json_string(reader: Reader, emit: Emit) -> Steps[bool]:
    """Read a JSON string with its quotes; otherwise like `json_value`."""
    if (yield from reader.need()) != '"':
        return False
    yield from emit(reader.take(1))
    while first := (yield from reader.need()):
        if plain := reader.match(_PLAIN):
            yield from emit(reader.take(len(plain)))
        elif first == '"':
            yield from emit(reader.take(1))
            return True
        elif first != "\\":
            yield from emit(escaped(reader.take(1)))
        elif escape := reader.match(_ESCAPE):
            yield from emit(reader.take(len(escape)))
        elif not reader.match(_BEGUN_ESCAPE) or not (yield from reader.more()):
            return False
    return False


def escaped(text: str) -> str:
    """The text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _scalar(reader: Reader, emit: Emit, names: Mapping[str, str]) -> Steps[bool]:
    """A number, true, false or null. It is complete once another character follows."""
    written = yield from reader.span(_IN_SCALAR)
    text = names.get(written, written)
    if not _SCALAR.fullmatch(text):
        reader.unread(written)
        return False
    yield from emit(text)
    return True


def _skip(reader: Reader, emit: Emit) -> Steps[None]:
    if skipped := (yield from reader.skip(WHITESPACE)):
        yield from emit(skipped)


_JSON = Notation('"', json_string, json_string)


_QUOTES = "'\""
_PYTHON_PLAIN = re.compile(r"[^'\"\\\x00-\x1f]+")
_CODE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U(?:000[0-9a-fA-F]|0010)[0-9a-fA-F]{4})")
_BEGUN_PYTHON_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?\Z")
_PYTHON_ESCAPES = dict(zip("ntrbfav0\\'\"\n", [*"\n\t\r\b\f\a\v\0\\'\"", ""], strict=True))
_PYTHON_NAMED = re.compile(r"\\[ntrbfav0\\'\"\n]")


def python_string(reader: Reader, emit: Emit) -> Steps[bool]:
    """Read a string in single or double quotes. As in Python, an unknown escape is a literal backslash."""
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
        if plain := reader.match(_PYTHON_PLAIN):
            yield from emit(escaped(reader.take(len(plain))))
        elif first != "\\":
            yield from emit(escaped(reader.take(1)))
        elif not (reader.match(_BEGUN_PYTHON_ESCAPE) and (yield from reader.more())):
            yield from emit(_escape(reader))
    return False


def _escape(reader: Reader) -> str:
    """Read a complete escape, as JSON."""
    if code := reader.match(_CODE):
        return json.dumps(chr(int(reader.take(len(code))[2:], 16)))[1:-1]
    if reader.match(_PYTHON_NAMED):
        return escaped(_PYTHON_ESCAPES[reader.take(2)[1]])
    return escaped(reader.take(1))


PYTHON = Notation(_QUOTES, python_string, python_string, {"True": "true", "False": "false", "None": "null"})


_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_SURROGATE = re.compile("[\ud800-\udfff]")


def json_call(reader: Reader, *, needs_arguments: bool = False) -> Steps[bool]:
    """Read an object with a call's name and arguments, in any order; False for any other object.

    Missing arguments count as an empty object. Arguments may also be a string that contains the object.

    Args:
        reader: the output.
        needs_arguments: whether an object without arguments is not a call, because it could be an answer.
    """
    call = _Call(needs_arguments=needs_arguments)
    if (yield from reader.literal("{")) is None:
        return False
    yield from reader.skip()
    if (yield from reader.literal("}")) is not None:
        return False
    while True:
        key = yield from _string(reader)
        yield from reader.skip()
        if key is None or (yield from reader.literal(":")) is None:
            return False
        yield from reader.skip()
        if not (yield from _entry(reader, call, is_name=key == _NAME, is_arguments=key in _ARGUMENTS)):
            return False
        yield from reader.skip()
        following = yield from reader.literal(",", "}")
        if following != ",":
            return (yield from call.end()) if following else False
        yield from reader.skip()


def json_calls(reader: Reader) -> Steps[bool]:
    """Read a non-empty list of call objects; False for anything else."""
    if (yield from reader.literal("[")) is None:
        return False
    return (yield from reader.items(lambda: json_call(reader), "]"))


def call_with_json(reader: Reader, begin: CallBegin, *ends: str) -> Steps[bool]:
    """Read a call's arguments as one JSON object, then each of the texts that end the call."""
    yield from reader.skip()
    if (yield from reader.need()) != "{":
        return False
    yield begin
    if not (yield from json_value(reader, arguments)):
        return False
    for end in ends:
        if (yield from reader.spaced_literal(end)) is None:
            return False
    yield CallEnd()
    return True


class _Call:
    """A call that is being read."""

    def __init__(self, *, needs_arguments: bool) -> None:
        self._needs_arguments = needs_arguments
        self.name: str | None = None
        self.has_arguments = False
        self.early = Kept()
        """Arguments that came before the name."""

    def end(self) -> Steps[bool]:
        """Emit the rest of the call; False if it is not a call."""
        if self.name is None or (self._needs_arguments and not self.has_arguments):
            return False
        if self.early.text or not self.has_arguments:
            yield CallBegin(self.name)
            yield CallArguments(self.early.text or "{}")
        yield CallEnd()
        return True


def _entry(reader: Reader, call: _Call, *, is_name: bool, is_arguments: bool) -> Steps[bool]:
    """Read one value of the object."""
    if is_name and call.name is None:
        call.name = yield from _string(reader)
        return bool(call.name)
    if is_arguments and not call.has_arguments:
        call.has_arguments = True
        return (yield from _arguments(reader, call))
    return (yield from json_value(reader, nowhere))


def _arguments(reader: Reader, call: _Call) -> Steps[bool]:
    first = yield from reader.need()
    if first == '"':
        text = whole_value((yield from _string(reader)) or "")
        yield from call.early(text or "")
        return text is not None and text.startswith("{")
    if first != "{":
        return False
    if call.name is None:
        return (yield from json_value(reader, call.early))
    yield CallBegin(call.name)
    return (yield from json_value(reader, arguments))


def _string(reader: Reader) -> Steps[str | None]:
    """The value of a string; None also for one with half of a surrogate pair, which is not valid text."""
    kept = Kept()
    if not (yield from json_string(reader, kept)):
        return None
    text: str = json.loads(kept.text)
    return None if _SURROGATE.search(text) else text
