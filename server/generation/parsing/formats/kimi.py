"""Kimi K2 and K3, which have different formats."""

import re

from server.generation.constraints.fragment import Fragment, either, sequence, text
from server.generation.parsing.arguments import Members, PropertyTags, in_quotes, quoted, tagged_arguments
from server.generation.parsing.call_grammar import FREE, GrammarBuilder, optional, unique
from server.generation.parsing.call_sections import CallSections
from server.generation.parsing.json_text import call_with_json, json_value
from server.generation.parsing.output_parser import Expected
from server.generation.parsing.parts import CallBegin, CallEnd, arguments, content, reasoning
from server.generation.parsing.reader import Reader, Steps, attributes

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"[^\s<]*")
_NAME_IN_ID = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]*)?")
_NUMBER = Fragment("/[0-9]{1,4}/")
_SECTIONS = CallSections(begins=(_SECTION,), ends=(_SECTION_END,), calls=(_CALL,))


class KimiK2:
    """Implements ToolFormat: sections of calls, each with an id that contains the name."""

    name = "kimi_k2"
    markers = (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END)
    ends_reasoning = (_SECTION,)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        return _SECTIONS.read(reader, expected, _call_by_id)

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        calls = [
            sequence(text(f"functions.{tool.name}:"), _NUMBER, builder.text(_ARGUMENTS), tool.arguments())
            for tool in builder.tools
        ]
        return _SECTIONS.grammar(builder, sequence(either(*calls), builder.text(_CALL_END)))


def _call_by_id(reader: Reader) -> Steps[bool]:
    yield from reader.skip()
    call_id = yield from reader.span(_ID)
    named = _NAME_IN_ID.fullmatch(call_id)
    if named is None or (yield from reader.spaced_literal(_ARGUMENTS)) is None:
        return False
    return (yield from call_with_json(reader, CallBegin(named[1], call_id), _CALL_END))


_OPEN, _CLOSE, _END = "<|open|>", "<|close|>", "<|sep|>"


class KimiK3:
    """Implements ToolFormat: elements whose tags are control tokens around text.

    Reads all of the output. The prompt has opened the reasoning or the answer.
    """

    name = "kimi_k3"
    markers = (_OPEN, _CLOSE, _END)
    ends_reasoning = ()

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        emit = reasoning if expected.is_thinking else content
        while (marker := (yield from reader.until(_OPEN, _CLOSE, emit=emit))) is not None:
            tag = yield from reader.attempt(marker, _tag(reader, marker), emit=emit, at_once=False)
            if tag:
                emit = reasoning if tag == _OPEN + "think" else content
            if tag == _OPEN + "tools":
                yield from _calls(reader, expected)

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        if not all(map(builder.is_control, self.markers)):
            return None
        ended = optional(builder.text(f"{_CLOSE}message{_END}"))
        calls = sequence(
            builder.text(f"{_CLOSE}response{_END}{_OPEN}tools{_END}"),
            builder.several(builder.rule(_call_as_written(builder))),
            builder.text(f"{_CLOSE}tools{_END}"),
        )
        response = builder.text(f"{_CLOSE}response{_END}")
        if builder.needs_call:
            answer = calls
        elif builder.answer is not None:
            answer = either(sequence(builder.answer, optional(response)), calls)
        else:
            answer = sequence(FREE, optional(either(response, calls)))
        opened = optional(builder.text(f"{_OPEN}response{_END}"))
        thought = sequence(FREE, builder.text(f"{_CLOSE}think{_END}")) if builder.is_thinking else text("")
        return unique(sequence(thought, opened, answer, ended))


def _call_as_written(builder: GrammarBuilder) -> Fragment:
    tags = PropertyTags(
        begin=lambda key, is_string: _argument_as_written(builder, text(_escaped(key)), is_string=is_string),
        any_begin=_argument_as_written(builder, Fragment(r"/[^<>\r\n\"&]+/"), is_string=True),
        end=f"{_CLOSE}argument{_END}",
        after=text(""),
        tells_strings=True,
    )
    calls = [
        sequence(
            text(f'call tool="{tool.name}" index="'),
            Fragment("/[0-9]{1,4}/"),
            builder.text(f'"{_END}'),
            tagged_arguments(builder, tool, tags),
        )
        for tool in builder.tools
    ]
    return sequence(builder.text(_OPEN), either(*calls), builder.text(f"{_CLOSE}call{_END}"))


def _argument_as_written(builder: GrammarBuilder, key: Fragment, *, is_string: bool) -> Fragment:
    """The opening tag of an argument."""
    kind = text("string") if is_string else Fragment("/number|boolean|null|object|array/")
    begin = builder.text(f'{_OPEN}argument key="')
    return sequence(begin, key, text('" type="'), kind, builder.text(f'"{_END}'))


def _escaped(key: str) -> str:
    return key.replace("&", "&amp;").replace('"', "&quot;")


def _tag(reader: Reader, marker: str) -> Steps[str]:
    """Read the rest of a tag of an element with text or calls. Returns its beginning; empty for any other tag."""
    element = yield from reader.literal("think", "response", "tools", "message")
    if element is None or (yield from reader.literal(_END)) is None:
        return ""
    return marker + element


def _calls(reader: Reader, expected: Expected) -> Steps[None]:
    """Read calls to the end of their element, or to the first invalid one."""
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
    """Read an element's opening tag. Returns its attributes; empty if it is another tag."""
    if (yield from reader.sequence(_OPEN, element)) is None:
        return {}
    given = yield from attributes(reader)
    if (yield from reader.literal(_END)) is None:
        return {}
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in given.items()}


def _string(reader: Reader) -> Steps[bool]:
    """Emit an argument's raw text, and read its closing tag."""
    while (marker := (yield from reader.until(_CLOSE, emit=in_quotes))) is not None:
        if (yield from reader.sequence("argument", _END)) is not None:
            return True
        yield from in_quotes(marker)
    return False
