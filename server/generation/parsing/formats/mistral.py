"""Mistral: a JSON list of calls up to tokenizer v7; later, a marker, a name and arguments for each call."""

from server.generation.constraints.fragment import Fragment, either, sequence, text
from server.generation.parsing.call_grammar import GrammarBuilder, calls_in_text, json_objects, optional
from server.generation.parsing.json_text import call_with_json, json_calls
from server.generation.parsing.output_parser import Expected, calls_after
from server.generation.parsing.parts import CallBegin
from server.generation.parsing.reader import NAME, Reader, Steps

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral:
    """Implements ToolFormat."""

    name = "mistral"
    markers = (_BEGIN, _ID, _ARGUMENTS)
    ends_reasoning = ()

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        return calls_after(reader, expected, (_BEGIN,), lambda _: _calls(reader))

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        if not builder.is_control(_ARGUMENTS):
            calls = sequence(optional(text(" ")), text("["), builder.several(json_objects(builder), ", "), text("]"))
            return calls_in_text(builder, {_BEGIN: calls}, None)
        own_id = Fragment("")
        if builder.is_control(_ID):
            own_id = optional(sequence(builder.text(_ID), Fragment("/[a-zA-Z0-9]{9}/")))
        calls = either(
            *(sequence(text(tool.name), own_id, builder.text(_ARGUMENTS), tool.arguments()) for tool in builder.tools)
        )
        return calls_in_text(builder, {_BEGIN: builder.rule(calls)}, "")


def _calls(reader: Reader) -> Steps[bool]:
    yield from reader.skip()
    if (yield from reader.need()) == "[":
        return (yield from json_calls(reader))
    tool = yield from reader.span(NAME)
    given_id = None
    if (yield from reader.literal(_ID)) is not None:
        given_id = yield from reader.span(NAME)
    yield from reader.literal(_ARGUMENTS)
    if not tool:
        return False
    return (yield from call_with_json(reader, CallBegin(tool, given_id)))
