"""A call as a JSON object: a name, the arguments, and what else a model may add."""

import json
import re
from collections.abc import Collection

from server.generation.parsing.emit import Kept, nowhere
from server.generation.parsing.json_text import json_string, json_value, whole_value
from server.generation.parsing.output_parser import arguments
from server.generation.parsing.parts import CallArguments, CallBegin, CallEnd
from server.generation.parsing.reader import Reader, Steps

_NAME = ("name",)
_ARGUMENTS = ("arguments", "parameters")
_SURROGATE = re.compile("[\ud800-\udfff]")


def json_call(
    reader: Reader,
    *,
    names: Collection[str] = _NAME,
    values: Collection[str] = _ARGUMENTS,
    needs_arguments: bool = False,
) -> Steps[bool]:
    """Read an object with a call's name and arguments, in any order; False where it is no such object.

    Arguments may be missing, which is an empty object, or a string that holds the object.

    Args:
        reader: of the output.
        names: keys of the name.
        values: keys of the arguments.
        needs_arguments: whether an object without arguments is no call: where nothing else tells it from an answer.
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
        if not (yield from _entry(reader, call, is_name=key in names, is_arguments=key in values)):
            return False
        yield from reader.skip()
        following = yield from reader.literal(",", "}")
        if following != ",":
            return (yield from call.end()) if following else False
        yield from reader.skip()


def json_calls(reader: Reader) -> Steps[bool]:
    """Read a list of such objects; False where it is no such list, or an empty one."""
    if (yield from reader.literal("[")) is None:
        return False
    return (yield from reader.items(lambda: json_call(reader), "]"))


class _Call:
    """What is known of a call so far."""

    def __init__(self, *, needs_arguments: bool) -> None:
        self._needs_arguments = needs_arguments
        self.name: str | None = None
        self.has_arguments = False
        self.early = Kept()
        """Arguments that came before the name."""

    def end(self) -> Steps[bool]:
        """Pass on what was not passed on yet; False if it is no call."""
        if self.name is None or (self._needs_arguments and not self.has_arguments):
            return False
        if self.early.text or not self.has_arguments:
            yield CallBegin(self.name)
            yield CallArguments(self.early.text or "{}")
        yield CallEnd()
        return True


def _entry(reader: Reader, call: _Call, *, is_name: bool, is_arguments: bool) -> Steps[bool]:
    """Read one value."""
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
    """The value of a string; None also for one with half of a surrogate pair, which is no text."""
    kept = Kept()
    if not (yield from json_string(reader, kept)):
        return None
    text: str = json.loads(kept.text)
    return None if _SURROGATE.search(text) else text
