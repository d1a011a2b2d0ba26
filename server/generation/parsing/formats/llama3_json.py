"""Llama 3.1 to 3.3: JSON objects, after a marker or with nothing before them."""

from server.generation.constraints.fragment import Fragment, either, sequence
from server.generation.parsing.call_grammar import Wanted, json_objects, unique
from server.generation.parsing.json_call import json_call
from server.generation.parsing.output_parser import Expected, content
from server.generation.parsing.reader import Reader, Steps

_TAG = "<|python_tag|>"
_SEPARATOR = ";"
_TEXT = r"/([ \t\r\n]*[^ \t\r\n{](.|\n)*)?/"
"""Any text that does not begin as a call does."""


class Llama3Json:
    """Implements ToolFormat. An object without a name and arguments is an answer in JSON."""

    name = "llama3_json"
    markers = (_TAG,)
    ends_reasoning = ()

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        """See ToolFormat."""
        before: str | None = yield from reader.skip()
        while before is not None:
            call = _call(reader)
            is_call = yield from reader.attempt(before, call, emit=content, at_once=expected.calls_are_whole)
            before = (yield from reader.spaced_literal(_SEPARATOR)) if is_call else None
            if before is None:
                before = yield from reader.until(_TAG, emit=content)

    def grammar(self, wanted: Wanted) -> Fragment | None:
        """See ToolFormat."""
        call = json_objects(wanted, "parameters")
        calls = wanted.rule(wanted.several(call, f"{_SEPARATOR} "))
        tagged = sequence(wanted.text(_TAG), calls)
        if wanted.needs_call:
            return unique(either(calls, tagged))
        if wanted.answer is not None:
            return either(wanted.answer, unique(tagged))
        return unique(either(calls, sequence(wanted.until(_TAG, _TEXT), calls), Fragment(_TEXT)))


def _call(reader: Reader) -> Steps[bool]:
    yield from reader.skip()
    return (yield from json_call(reader, needs_arguments=True))
