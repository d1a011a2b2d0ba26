"""Reading JSON that is still being written."""

import re

from server.generation.parsing.parts import Part
from server.generation.parsing.reader import WHITESPACE, Emit, Reader, Steps

_MOST_NESTED = 256
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null)")
_IN_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_CONTROL_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def json_value(reader: Reader, emit: Emit) -> Steps[bool]:
    """Read one JSON value, and pass its text on as it comes; False at the first character that JSON does not allow.

    A control character that stands raw in a string, as models write line breaks, is passed on escaped. Whitespace
    before the value is left out.
    """
    open_brackets: list[str] = []
    while True:
        if not (yield from _value_or_bracket(reader, emit, open_brackets)):
            return False
        if (closed := (yield from _after_value(reader, emit, open_brackets))) is not None:
            return closed


def json_object(reader: Reader, emit: Emit) -> Steps[bool]:
    """Read one JSON object. Otherwise as `json_value`."""
    yield from reader.skip()
    if (yield from reader.need()) != "{":
        return False
    return (yield from json_value(reader, emit))


def _value_or_bracket(reader: Reader, emit: Emit, open_brackets: list[str]) -> Steps[bool]:
    """Read up to the end of the first value that has no more inside: a scalar, a string, or an empty collection."""
    while True:
        yield from _skip(reader, emit if open_brackets else _nowhere)
        first = yield from reader.need()
        if first == '"':
            return (yield from json_string(reader, emit))
        if first not in ("{", "["):
            return (yield from _scalar(reader, emit))
        if len(open_brackets) == _MOST_NESTED:
            return False
        open_brackets.append("}" if first == "{" else "]")
        yield from emit(reader.take(1))
        yield from _skip(reader, emit)
        if (yield from reader.need()) == open_brackets[-1]:
            open_brackets.pop()
            yield from emit(reader.take(1))
            return True
        if first == "{" and not (yield from _key(reader, emit)):
            return False


def _after_value(reader: Reader, emit: Emit, open_brackets: list[str]) -> Steps[bool | None]:
    """Read what stands between a value and the next one; True if all is closed, False if it is not JSON."""
    while open_brackets:
        yield from _skip(reader, emit)
        next_one = yield from reader.need()
        if next_one == ",":
            yield from emit(reader.take(1))
            if open_brackets[-1] == "]":
                return None
            yield from _skip(reader, emit)
            return None if (yield from _key(reader, emit)) else False
        if next_one != open_brackets[-1]:
            return False
        open_brackets.pop()
        yield from emit(reader.take(1))
    return True


def _key(reader: Reader, emit: Emit) -> Steps[bool]:
    if not (yield from json_string(reader, emit)):
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
    while True:
        if not (yield from reader.need()):
            return False
        text = reader.known
        if plain := _PLAIN.match(text):
            yield from emit(reader.take(plain.end()))
        elif text[0] == '"':
            yield from emit(reader.take(1))
            return True
        elif text[0] != "\\":
            yield from emit(escape_control(reader.take(1)))
        elif escape := _ESCAPE.match(text):
            yield from emit(reader.take(escape.end()))
        elif not _BEGUN_ESCAPE.fullmatch(text) or not (yield from reader.more()):
            return False


def escape_control(character: str) -> str:
    """A control character as JSON writes it in a string."""
    return _CONTROL_ESCAPES.get(character) or f"\\u{ord(character):04x}"


def _scalar(reader: Reader, emit: Emit) -> Steps[bool]:
    """A number, true, false or null: known when something else follows."""
    while True:
        begun = _IN_SCALAR.match(reader.known)
        assert begun is not None
        if begun.end() < len(reader.known) or not (yield from reader.more()):
            break
    if not _SCALAR.fullmatch(begun[0]):
        return False
    yield from emit(reader.take(begun.end()))
    return True


def _skip(reader: Reader, emit: Emit) -> Steps[None]:
    if skipped := (yield from reader.skip(WHITESPACE)):
        yield from emit(skipped)


def _nowhere(_: str) -> tuple[Part, ...]:
    return ()
