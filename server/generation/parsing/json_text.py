"""Reading JSON that is still being written."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from server.generation.parsing.emit import Emit, Kept, nowhere
from server.generation.parsing.reader import WHITESPACE, Reader, Steps, result

_MOST_NESTED = 256
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR = re.compile(r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null)")
_IN_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Notation:
    """What a language of data writes in its own way. Brackets, commas and colons are as in JSON."""

    quotes: str
    """A string begins with one of these."""
    string: Callable[[Reader, Emit], Steps[bool]]
    """Reads a string, and passes it on as JSON."""
    key: Callable[[Reader, Emit], Steps[bool]]
    """The same for the key of a member."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What JSON has for its names of values."""


def json_value(reader: Reader, emit: Emit, notation: Notation | None = None) -> Steps[bool]:
    """Read one JSON value, and pass its text on as it comes; False at the first character that JSON does not allow.

    A control character that stands raw in a string, as models write line breaks, is passed on escaped. Whitespace
    before the value is left out.

    Args:
        reader: of the output.
        emit: takes the text.
        notation: in which the value is written, if that is not JSON; it is passed on as JSON.
    """
    notation = notation or _JSON
    open_brackets: list[str] = []
    while True:
        if not (yield from _value_or_bracket(reader, emit, open_brackets, notation)):
            return False
        if (closed := (yield from _after_value(reader, emit, open_brackets, notation))) is not None:
            return closed


def json_object(reader: Reader, emit: Emit) -> Steps[bool]:
    """Read one JSON object. Otherwise as `json_value`."""
    yield from reader.skip()
    if (yield from reader.need()) != "{":
        return False
    return (yield from json_value(reader, emit))


def whole_value(text: str, notation: Notation | None = None) -> str | None:
    """The text as JSON, if it is one value and nothing else."""
    reader = Reader()
    reader.feed(text)
    reader.end(is_cut=False)
    kept = Kept()
    if not result(json_value(reader, kept, notation)):
        return None
    result(reader.skip())
    return None if result(reader.need()) else kept.text


def _value_or_bracket(reader: Reader, emit: Emit, open_brackets: list[str], notation: Notation) -> Steps[bool]:
    """Read up to the end of the first value that has no more inside: a scalar, a string, or an empty collection."""
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
    """Read what stands between a value and the next one; True if all is closed, False if it is not JSON."""
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
    """Read a string with its quotes. Otherwise as `json_value`."""
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
    """Text as JSON writes it in a string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _scalar(reader: Reader, emit: Emit, names: Mapping[str, str]) -> Steps[bool]:
    """A number, true, false or null: known when something else follows."""
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
