"""Qwen3-Coder, Qwen from 3.5 on, and Seed-OSS: a function and its parameters as tags, with values as plain text."""

from server.generation.constraints.fragment import Fragment, either, sequence, text
from server.generation.parsing.arguments import PropertyTags, TypedArguments, tagged_arguments
from server.generation.parsing.call_grammar import GrammarBuilder, OfferedTool, calls_in_text
from server.generation.parsing.output_parser import Expected, calls_after
from server.generation.parsing.parts import CallBegin, CallEnd
from server.generation.parsing.reader import IN_TAG, NAME, WHITESPACE, Reader, Steps

_SEED_BEGIN = "<seed:tool_call>"
_BEGINS = ("<tool_call>", _SEED_BEGIN)
_ENDS = ("</tool_call>", "</seed:tool_call>")
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_LINE = "\n"
_AFTER_VALUE = (_PARAMETER_END, _LINE + _PARAMETER, _FUNCTION_END)
_AFTER_LINES = (*_AFTER_VALUE, _LINE + _PARAMETER_END, _LINE + _FUNCTION_END)
"""Ends of a value that began on its own line, as Qwen's do: the line end before the tag is not part of the value."""


class Qwen3Xml:
    """Implements ToolFormat. Models may omit the outer tags, and a value's end tag before another tag."""

    name = "qwen3_xml"
    markers = (*_BEGINS, *_ENDS)
    ends_reasoning = _BEGINS

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        return calls_after(
            reader,
            expected,
            (*_BEGINS, _FUNCTION),
            lambda begin: _call(reader, expected, is_bare=begin.endswith(_FUNCTION)),
            WHITESPACE,
        )

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        calls = builder.rule(either(*(_function(builder, tool) for tool in builder.tools)))
        begins = {}
        tags = zip(_BEGINS, _ENDS, strict=True)
        for begin, end in sorted(tags, key=lambda tag: builder.is_control(tag[0]), reverse=True):
            begins[begin] = sequence(text(f"\n{_FUNCTION}"), calls, builder.text(f"\n{end}"))
        return calls_in_text(builder, {**begins, _FUNCTION: calls}, "\n")


def _function(builder: GrammarBuilder, tool: OfferedTool) -> Fragment:
    """The rest of a function. Qwen writes values on their own lines, Seed does not."""
    line = "" if builder.is_control(_SEED_BEGIN) else _LINE
    tags = PropertyTags(
        begin=lambda key, _: text(f"{_PARAMETER}{key}>{line}"),
        any_begin=sequence(text(_PARAMETER), Fragment(r"/[^<>\r\n]+/"), text(f">{line}")),
        end=line + _PARAMETER_END,
        after=text(_LINE),
        barred=(_PARAMETER, _PARAMETER_END, _FUNCTION_END),
    )
    given = tagged_arguments(builder, tool, tags)
    return sequence(text(f"{tool.name}>\n"), given, text(_FUNCTION_END))


def _call(reader: Reader, expected: Expected, *, is_bare: bool) -> Steps[bool]:
    if not is_bare and (yield from reader.spaced_literal(_FUNCTION)) is None:
        return False
    tool = yield from reader.span(NAME)
    if not tool or (yield from reader.literal(">")) is None:
        return False
    tag = yield from reader.spaced_literal(_PARAMETER, _FUNCTION_END)
    if tag is None:
        return False
    yield CallBegin(tool)
    given = TypedArguments(expected.tools.get(tool))
    while tag is not None and tag.endswith(_PARAMETER):
        tag = yield from _parameter(reader, given)
    if tag is None:
        return False
    yield from given.close()
    yield CallEnd()
    if tag.endswith(_FUNCTION_END):
        yield from reader.spaced_literal(*_ENDS)
    return True


def _parameter(reader: Reader, given: TypedArguments) -> Steps[str | None]:
    """Read a parameter and the tag after it; None if it is invalid."""
    key = yield from reader.span(IN_TAG)
    if not key or (yield from reader.literal(">")) is None or not (yield from given.begin(key)):
        return None
    ends = _AFTER_VALUE if (yield from reader.literal(_LINE)) is None else _AFTER_LINES
    while (end := (yield from reader.until(*ends, emit=given.text))) is not None:
        if (tag := (yield from _tag_after(reader, end))) is not None:
            yield from given.end()
            return tag
        yield from given.text(end)
    return None


def _tag_after(reader: Reader, end: str) -> Steps[str | None]:
    """The tag after the end of a value. None if the value goes on, because values may contain tags."""
    if end.endswith(_PARAMETER):
        return end
    if end.endswith(_FUNCTION_END):
        return (yield from reader.spaced_literal(*_ENDS))
    return (yield from reader.spaced_literal(_PARAMETER, _FUNCTION_END, *_ENDS))
