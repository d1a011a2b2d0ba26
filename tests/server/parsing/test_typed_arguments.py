"""Which value a plain text is, by the schema of the tool."""

import json

import pytest

from server.generation.parsing.arguments import TypedArguments
from server.generation.parsing.parts import CallArguments
from server.generation.parsing.reader import result

STRING_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "02139", "02139"),
        ({"type": "string"}, " null ", " null "),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "integer"}, " 7\n", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "integer"}, "123456789012345678901234567890", 123456789012345678901234567890),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "['it\\'s', None]", ["it's", None]),
        ({"type": "array"}, "[" * 10_000, "[" * 10_000),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        (STRING_OR_NULL, '"quoted"', '"quoted"'),
        ({"oneOf": [STRING_OR_NULL, {"type": "integer"}]}, "5", 5),
        ({"$ref": "#/$defs/Other"}, '{"a": 1}', {"a": 1}),
        ({}, "true", True),
        ({}, "some text", "some text"),
        (None, "1.5", 1.5),
        (True, "", ""),
        ({"type": 5}, "5", 5),
    ],
)
def test_a_text_is_what_the_schema_allows(schema: object, text: str, value: object):
    arguments = TypedArguments({"properties": {"key": schema}})
    begun = list(arguments.begin("key"))
    pieces = [part for piece in text for part in arguments.text(piece)]
    parts = [*begun, *pieces, *arguments.end(), *arguments.close()]
    written = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert json.dumps(json.loads(written)) == json.dumps({"key": value})


def test_an_argument_can_be_given_once():
    arguments = TypedArguments(None)
    assert result(arguments.begin("key"))
    assert not result(arguments.begin("key"))
