"""Llama 3.1 to 3.3: JSON objects, after a marker or at the beginning."""

import re

from server.generation.constraints.fragment import FREE_TEXT, Fragment, either, sequence
from server.generation.parsing.call_grammar import GrammarBuilder, OfferedTool, json_objects, unique
from server.generation.parsing.json_text import call_with_json, json_call
from server.generation.parsing.output_parser import Expected
from server.generation.parsing.parts import CallBegin, content
from server.generation.parsing.reader import NAME, Reader, Steps

_TAG = "<|python_tag|>"
_SEPARATOR = ";"
_SPACE = r"[ \t\r\n]*"
_ARGUMENTS = ('"parameters"', '"arguments"')


class Llama3Json:
    """Implements ToolFormat.

    Without a marker, an object at the beginning of the output is a call if it has a name, then arguments, and nothing
    else except a type before them. Any other object is a JSON answer. If the answer is constrained, all objects are.
    """

    name = "llama3_json"
    markers = (_TAG,)
    ends_reasoning = ()

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        before: str | None = None if expected.has_constraint else (yield from reader.skip())
        read_call = _bare_call
        while True:
            if before is None:
                before, read_call = (yield from reader.until(_TAG, emit=content)), _marked_call
            if before is None:
                return
            call = read_call(reader)
            is_call = yield from reader.attempt(before, call, emit=content, at_once=expected.calls_are_whole)
            before = (yield from reader.spaced_literal(_SEPARATOR)) if is_call else None

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        """In free text, everything that begins like a call of an offered tool is a call."""
        if builder.needs_call or builder.answer is not None:
            calls = builder.rule(builder.several(json_objects(builder, "parameters"), f"{_SEPARATOR} "))
            marked = sequence(builder.text(_TAG), calls)
            return unique(either(calls, marked)) if builder.answer is None else either(builder.answer, unique(marked))
        call = builder.rule(either(*(_call_as_written(tool) for tool in builder.tools)))
        calls = builder.rule(builder.several(call, _SEPARATOR))
        names = "|".join(re.escape(tool.name) for tool in builder.tools)
        other = builder.new_name().upper()
        rule = f"{other}: {FREE_TEXT} & ~(/{_header_as_written(names)}\\{{/ {FREE_TEXT})\n"
        marked = sequence(builder.until(_TAG, other), calls)
        return unique(Fragment(f"({calls.start} | {marked.start} | {other})", calls.rules + marked.rules + rule))


def _call_as_written(tool: OfferedTool) -> Fragment:
    """A call with any whitespace, as `_bare_call` reads it."""
    header = Fragment(f"/{_header_as_written(re.escape(tool.name))}/")
    return sequence(header, tool.arguments(), Fragment(rf"/{_SPACE}\}}/"))


def _header_as_written(name: str) -> str:
    """An expression for what precedes the arguments, as `_header` reads it; `name` is an expression, too."""
    kind = rf'("type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?'
    keys = "|".join(_ARGUMENTS)
    return rf'{_SPACE}\{{{_SPACE}{kind}"name"{_SPACE}:{_SPACE}"({name})"{_SPACE},{_SPACE}({keys}){_SPACE}:{_SPACE}'


def _marked_call(reader: Reader) -> Steps[bool]:
    yield from reader.skip()
    return (yield from json_call(reader, needs_arguments=True))


def _bare_call(reader: Reader) -> Steps[bool]:
    name = yield from _header(reader)
    if not name:
        return False
    return (yield from call_with_json(reader, CallBegin(name), "}"))


def _header(reader: Reader) -> Steps[str]:
    """Read what precedes the arguments. Returns the name; empty for anything else."""
    if not (yield from _all_of(reader, "{")):
        return ""
    key = yield from reader.spaced_literal('"type"', '"name"')
    if key == '"type"' and not (yield from _all_of(reader, ":", '"function"', ",", '"name"')):
        return ""
    if key is None or not (yield from _all_of(reader, ":", '"')):
        return ""
    name = yield from reader.span(NAME)
    if (yield from reader.literal('"')) is None or not (yield from _all_of(reader, ",")):
        return ""
    if (yield from reader.spaced_literal(*_ARGUMENTS)) is None or not (yield from _all_of(reader, ":")):
        return ""
    return name


def _all_of(reader: Reader, *texts: str) -> Steps[bool]:
    """Read these texts, each after any whitespace. Returns False at the first that is missing."""
    for one in texts:
        if (yield from reader.spaced_literal(one)) is None:
            return False
    return True
