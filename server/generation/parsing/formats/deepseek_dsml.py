"""DeepSeek V3.2, V4 and V4.1: calls as tags, with a tag for each argument. They differ in a space and a word."""

from server.generation.parsing.attributes import attributes
from server.generation.parsing.call_sections import CallSections
from server.generation.parsing.json_text import json_value
from server.generation.parsing.members import Members, in_quotes, quoted
from server.generation.parsing.output_parser import Expected, arguments
from server.generation.parsing.parts import CallBegin, CallEnd
from server.generation.parsing.reader import Reader, Steps

_BEGINS = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>")
_ENDS = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "</｜DSML｜ calls>")
_CALLS, _CALL_ENDS = ("<｜DSML｜invoke", "<｜DSML｜ invoke"), ("</｜DSML｜invoke>", "</｜DSML｜ invoke>")
_PARAMETERS = ("<｜DSML｜parameter", "<｜DSML｜ parameter")
_PARAMETER_ENDS = ("</｜DSML｜parameter>", "</｜DSML｜ parameter>")
_SECTIONS = CallSections(_BEGINS, _ENDS, _CALLS, trim="\n")


class DeepseekDsml:
    """Implements ToolFormat."""

    name = "deepseek_dsml"
    markers = ("｜DSML｜",)
    ends_reasoning = _BEGINS

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        """See ToolFormat."""
        yield from _SECTIONS.read(reader, expected, _call)


def _call(reader: Reader) -> Steps[bool]:
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
    """Read the arguments, and the end of the call."""
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
