"""Kimi K3: the reasoning, the answer and the calls are elements, whose tags are control tokens around text."""

from server.generation.constraints.fragment import Fragment, either, sequence, text
from server.generation.parsing import property_grammar
from server.generation.parsing.attributes import attributes
from server.generation.parsing.call_grammar import FREE, Wanted, optional, unique
from server.generation.parsing.json_text import json_value
from server.generation.parsing.members import Members, in_quotes, quoted
from server.generation.parsing.output_parser import Expected, arguments, content
from server.generation.parsing.parts import CallBegin, CallEnd
from server.generation.parsing.property_grammar import PropertyTags
from server.generation.parsing.reader import Reader, Steps
from server.generation.parsing.think_tags import reasoning

_OPEN, _CLOSE, _END = "<|open|>", "<|close|>", "<|sep|>"


class KimiK3:
    """Implements ToolFormat. Reads all of the output; the prompt has opened the reasoning, or else the answer."""

    name = "kimi_k3"
    markers = (_OPEN, _CLOSE, _END)
    ends_reasoning = ()

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        """See ToolFormat."""
        emit = reasoning if expected.is_thinking else content
        while (marker := (yield from reader.until(_OPEN, _CLOSE, emit=emit))) is not None:
            tag = yield from reader.attempt(marker, _tag(reader, marker), emit=emit, at_once=False)
            if tag:
                emit = reasoning if tag == _OPEN + "think" else content
            if tag == _OPEN + "tools":
                yield from _calls(reader, expected)

    def grammar(self, wanted: Wanted) -> Fragment | None:
        """See ToolFormat."""
        if not all(map(wanted.is_control, self.markers)):
            return None
        ended = optional(wanted.text(f"{_CLOSE}message{_END}"))
        calls = sequence(
            wanted.text(f"{_CLOSE}response{_END}{_OPEN}tools{_END}"),
            wanted.several(wanted.rule(_call_as_written(wanted))),
            wanted.text(f"{_CLOSE}tools{_END}"),
        )
        response = wanted.text(f"{_CLOSE}response{_END}")
        if wanted.needs_call:
            answer = calls
        elif wanted.answer is not None:
            answer = either(sequence(wanted.answer, optional(response)), calls)
        else:
            answer = sequence(FREE, optional(either(response, calls)))
        opened = optional(wanted.text(f"{_OPEN}response{_END}"))
        thought = sequence(FREE, wanted.text(f"{_CLOSE}think{_END}")) if wanted.is_thinking else text("")
        return unique(sequence(thought, opened, answer, ended))


def _call_as_written(wanted: Wanted) -> Fragment:
    tags = PropertyTags(
        begin=lambda key, is_string: _argument_as_written(wanted, text(_escaped(key)), is_string=is_string),
        any_begin=_argument_as_written(wanted, Fragment(r"/[^<>\r\n\"&]+/"), is_string=True),
        end=f"{_CLOSE}argument{_END}",
        after=text(""),
        tells_strings=True,
    )
    calls = [
        sequence(
            text(f'call tool="{tool.name}" index="'),
            Fragment("/[0-9]{1,4}/"),
            wanted.text(f'"{_END}'),
            property_grammar.arguments(wanted, tool, tags),
        )
        for tool in wanted.tools
    ]
    return sequence(wanted.text(_OPEN), either(*calls), wanted.text(f"{_CLOSE}call{_END}"))


def _argument_as_written(wanted: Wanted, key: Fragment, *, is_string: bool) -> Fragment:
    """The tag that opens an argument."""
    kind = text("string") if is_string else Fragment("/number|boolean|null|object|array/")
    begin = wanted.text(f'{_OPEN}argument key="')
    return sequence(begin, key, text('" type="'), kind, wanted.text(f'"{_END}'))


def _escaped(key: str) -> str:
    return key.replace("&", "&amp;").replace('"', "&quot;")


def _tag(reader: Reader, marker: str) -> Steps[str]:
    """Read the rest of a tag of an element that holds text or calls: how it begins, or nothing if it is no such tag."""
    element = yield from reader.literal("think", "response", "tools", "message")
    if element is None or (yield from reader.literal(_END)) is None:
        return ""
    return marker + element


def _calls(reader: Reader, expected: Expected) -> Steps[None]:
    """Read calls up to the end of their element, or to the first that is none."""
    before = f"{_OPEN}tools{_END}"
    while (yield from reader.sequence(_CLOSE, "tools", _END)) is None:
        reading = _call(reader)
        if not (yield from reader.attempt(before, reading, emit=content, at_once=expected.calls_are_whole)):
            return
        before = ""


def _call(reader: Reader) -> Steps[bool]:
    name = (yield from _open(reader, "call")).get("tool")
    if not name:
        return False
    yield CallBegin(name)
    members = Members()
    while argument := (yield from _open(reader, "argument")):
        if not (yield from _argument(reader, argument, members)):
            return False
    if (yield from reader.sequence(_CLOSE, "call", _END)) is None:
        return False
    yield from members.end()
    yield CallEnd()
    return True


def _argument(reader: Reader, given: dict[str, str], members: Members) -> Steps[bool]:
    if "key" not in given or not (yield from members.begin(given["key"])):
        return False
    if given.get("type") == "string":
        return (yield from quoted(_string(reader)))
    if not (yield from json_value(reader, arguments)):
        return False
    yield from reader.skip()
    return (yield from reader.sequence(_CLOSE, "argument", _END)) is not None


def _open(reader: Reader, element: str) -> Steps[dict[str, str]]:
    """Read a tag that opens an element: its attributes; none if it is no such tag."""
    if (yield from reader.sequence(_OPEN, element)) is None:
        return {}
    given = yield from attributes(reader)
    if (yield from reader.literal(_END)) is None:
        return {}
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in given.items()}


def _string(reader: Reader) -> Steps[bool]:
    """Pass on the raw text of an argument, and read the tag that closes it."""
    while (marker := (yield from reader.until(_CLOSE, emit=in_quotes))) is not None:
        if (yield from reader.sequence("argument", _END)) is not None:
            return True
        yield from in_quotes(marker)
    return False
