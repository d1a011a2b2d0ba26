"""GLM from 4.5 on: a name, then keys and values in tags, with values as plain text."""

import re

from server.generation.constraints.fragment import Fragment, either, sequence, text
from server.generation.parsing.arguments import PropertyTags, TypedArguments, tagged_arguments
from server.generation.parsing.call_grammar import GrammarBuilder, calls_in_text
from server.generation.parsing.output_parser import Expected, calls_after
from server.generation.parsing.parts import CallBegin, CallEnd
from server.generation.parsing.reader import IN_TAG, NAME, WHITESPACE, Reader, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_MORE = re.compile(r"\s*\S")


class Glm:
    """Implements ToolFormat. Line breaks between tags have no meaning; models up to 4.6 write them."""

    name = "glm"
    markers = (_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    ends_reasoning = (_BEGIN,)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        return calls_after(reader, expected, (_BEGIN,), lambda _: _call(reader, expected), WHITESPACE)

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        lines = Fragment('"\\n"?')
        tags = PropertyTags(
            begin=lambda key, _: sequence(builder.text(f"{_KEY}{key}{_KEY_END}"), lines, builder.text(_VALUE)),
            any_begin=sequence(
                builder.text(_KEY), Fragment(r"/[^<>\r\n]+/"), builder.text(_KEY_END), lines, builder.text(_VALUE)
            ),
            end=_VALUE_END,
            after=lines,
            barred=(_END,),
        )
        calls = [sequence(text(tool.name), lines, tagged_arguments(builder, tool, tags)) for tool in builder.tools]
        return calls_in_text(builder, {_BEGIN: sequence(either(*calls), builder.text(_END))}, "\n")


def _call(reader: Reader, expected: Expected) -> Steps[bool]:
    yield from reader.skip()
    tool = yield from reader.span(NAME)
    tag = yield from reader.spaced_literal(_KEY, _END)
    if not tool or tag is None:
        return False
    yield CallBegin(tool)
    given = TypedArguments(expected.tools.get(tool))
    while tag is not None and tag.endswith(_KEY):
        tag = yield from _argument(reader, given)
    if tag is None:
        return False
    yield from given.close()
    yield CallEnd()
    return True


def _argument(reader: Reader, given: TypedArguments) -> Steps[str | None]:
    """Read an argument and the tag after it; None if it is invalid."""
    key = yield from reader.span(IN_TAG)
    if not key or (yield from reader.literal(_KEY_END)) is None:
        return None
    if (yield from reader.spaced_literal(_VALUE)) is None or not (yield from given.begin(key)):
        return None
    while (end := (yield from reader.until(_VALUE_END, _END, emit=given.text))) is not None:
        if end == _VALUE_END:
            yield from given.end()
            return (yield from reader.spaced_literal(_KEY, _END))
        if (yield from _is_last(reader)):
            yield from given.end()
            return end
        yield from given.text(end)
    return None


def _is_last(reader: Reader) -> Steps[bool]:
    """Whether an end tag ends the call although its last value was not closed: only more calls may follow."""
    has_next = (yield from reader.spaced_ahead(_BEGIN)) is not None
    return has_next or not reader.match(_MORE)
