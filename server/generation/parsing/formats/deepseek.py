"""DeepSeek: sections of calls, with arguments as JSON or each in a tag."""

import re

from server.generation.constraints.fragment import Fragment, either, sequence, text
from server.generation.parsing.arguments import Members, PropertyTags, in_quotes, quoted, tagged_arguments
from server.generation.parsing.call_grammar import GrammarBuilder, calls_in_text
from server.generation.parsing.call_sections import CallSections
from server.generation.parsing.json_text import call_with_json, json_value
from server.generation.parsing.output_parser import Expected
from server.generation.parsing.parts import CallBegin, CallEnd, arguments
from server.generation.parsing.reader import Reader, Steps, attributes

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE, _FENCE_END = "```json", "```"
_NAME = re.compile(r"[^\s<`{]*")
_SECTIONS = CallSections(begins=(_BEGIN,), ends=(_END,), calls=(_CALL,))


class DeepseekV3:
    """Implements ToolFormat for V3, R1 and V3.1, with arguments as JSON."""

    name = "deepseek_v3"
    markers = (_BEGIN, _END, _CALL, _SEPARATOR, _CALL_END)
    ends_reasoning = (_BEGIN,)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        return _SECTIONS.read(reader, expected, _call)

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        written = [(tool.name, builder.rule(tool.arguments())) for tool in builder.tools]
        bare = [sequence(builder.text(name + _SEPARATOR), given) for name, given in written]
        fenced = [sequence(text(f"{name}\n{_FENCE}\n"), given, text(f"\n{_FENCE_END}")) for name, given in written]
        typed = sequence(builder.text(f"function{_SEPARATOR}"), either(*fenced))
        call = sequence(either(*bare, typed), builder.text(_CALL_END))
        return _SECTIONS.grammar(builder, call)


def _call(reader: Reader) -> Steps[bool]:
    """Read a call. V3.1 writes `name<sep>{...}`; V3 writes `function<sep>name` and the arguments in a code fence."""
    name = yield from reader.span(_NAME)
    if (yield from reader.literal(_SEPARATOR)) is None:
        return False
    fenced_name = yield from reader.span(_NAME)
    if fenced_name and (yield from reader.spaced_literal(_FENCE)) is None:
        return False
    if not name:
        return False
    ends = (_FENCE_END, _CALL_END) if fenced_name else (_CALL_END,)
    return (yield from call_with_json(reader, CallBegin(fenced_name or name), *ends))


_MARKER = "｜DSML｜"
_BEGINS = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>")
_ENDS = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "</｜DSML｜ calls>")
_CALLS, _CALL_ENDS = ("<｜DSML｜invoke", "<｜DSML｜ invoke"), ("</｜DSML｜invoke>", "</｜DSML｜ invoke>")
_PARAMETERS = ("<｜DSML｜parameter", "<｜DSML｜ parameter")
_PARAMETER_ENDS = ("</｜DSML｜parameter>", "</｜DSML｜ parameter>")
_TAG_SECTIONS = CallSections(_BEGINS, _ENDS, _CALLS, trim="\n")
_SPACE = Fragment('" "?')
_SECTION_NAME = either(text("function_calls"), text("tool_calls"), text(" calls"))


class DeepseekDsml:
    """Implements ToolFormat for V3.2, V4 and V4.1, which differ in a space and a word. Each argument has a tag."""

    name = "deepseek_dsml"
    markers = (_MARKER,)
    ends_reasoning = _BEGINS

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        return _TAG_SECTIONS.read(reader, expected, _tagged_call)

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        tags = PropertyTags(
            begin=lambda key, is_string: _open(builder, "parameter", f'"{key}" string="{str(is_string).lower()}"'),
            any_begin=sequence(
                _open(builder, "parameter", '"', end=""), Fragment(r"/[^<>\"\r\n]+/"), text('" string="true">')
            ),
            end=f"</{_MARKER}",
            after=sequence(_SPACE, text("parameter>\n")),
            tells_strings=True,
        )
        calls = [
            sequence(_open(builder, "invoke", f'"{tool.name}"', end=">\n"), tagged_arguments(builder, tool, tags))
            for tool in builder.tools
        ]
        call = sequence(either(*calls), builder.text(f"</{_MARKER}"), _SPACE, text("invoke>\n"))
        several = builder.several(builder.rule(call))
        rest = sequence(_SECTION_NAME, text(">\n"), several, builder.text(f"</{_MARKER}"), _SECTION_NAME, text(">"))
        return calls_in_text(builder, {f"<{_MARKER}": rest}, None)


def _open(builder: GrammarBuilder, tag: str, name: str, *, end: str = ">") -> Fragment:
    """An opening tag from its start to the text `end` after its name."""
    return sequence(builder.text(f"<{_MARKER}"), _SPACE, text(f"{tag} name={name}{end}"))


def _tagged_call(reader: Reader) -> Steps[bool]:
    name = (yield from attributes(reader)).get("name")
    tag_end = yield from reader.literal(">", "/>")
    if not name or tag_end is None:
        return False
    yield CallBegin(name)
    members = Members()
    if tag_end == ">" and not (yield from _parameters(reader, members)):
        return False
    yield from members.end()
    yield CallEnd()
    return True


def _parameters(reader: Reader, members: Members) -> Steps[bool]:
    """Read the arguments and the end of the call."""
    while (yield from reader.spaced_literal(*_PARAMETERS)) is not None:
        if not (yield from _parameter(reader, members)):
            return False
    return (yield from reader.spaced_literal(*_CALL_ENDS)) is not None


def _parameter(reader: Reader, members: Members) -> Steps[bool]:
    given = yield from attributes(reader)
    if "name" not in given or (yield from reader.literal(">")) is None:
        return False
    if not (yield from members.begin(given["name"])):
        return False
    if given.get("string") == "true":
        return (yield from quoted(reader.until(*_PARAMETER_ENDS, emit=in_quotes)))
    if not (yield from json_value(reader, arguments)):
        return False
    return (yield from reader.spaced_literal(*_PARAMETER_ENDS)) is not None
