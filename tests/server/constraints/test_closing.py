"""Objects have only the properties that their schema names, wherever it names them, unless it says otherwise."""

import json
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from server.generation.constraints.check import grammar_of
from server.generation.constraints.closing import CLOSED
from server.generation.constraints.fragment import ConstraintError, whole
from server.generation.constraints.json_schema import BOUNDED, JsonSchema
from server.generation.parsing.call_grammar import OfferedTool
from tests.server.constraints.matching import accepts, begins, walk

_A = {"type": "object", "properties": {"a": {"type": "integer"}}}
_B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
_CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
_DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "good": {"type": "boolean"}}, "required": ["kind"]}
_PETS = {"$defs": {"cat": _CAT, "dog": _DOG}, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}

CLOSED_SCHEMAS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "properties": (_A, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    "no properties": ({"type": "object", "properties": {}}, [{}], [{"b": 1}]),
    "required": ({**_A, "required": ["z"]}, [{"z": 1}, {"a": 1, "z": 1}], [{"z": 1, "b": 1}]),
    "values": (
        {"type": "object", "properties": {"x": {"type": "array", "items": _A}, "y": {"prefixItems": [_A]}}},
        [{"x": [{"a": 1}]}, {"y": [{}]}],
        [{"x": [{"b": 1}]}, {"y": [{"b": 1}]}],
    ),
    "allOf": (
        {"allOf": [_A, _B], "properties": {"c": True}},
        [{"c": 1, "a": 1, "b": 1}, {"b": 1}],
        [{"b": 1, "z": 1}, {"a": 1}],
    ),
    "a reference and more": (
        {"$defs": {"a": _A}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        [{"x": {"a": 1}, "a": 1}, {}],
        [{"x": {"b": 1}}, {"b": 1}, {"x": {"x": {}}}],
    ),
    "nested references": (
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}, _A]}, "b": _B}, "allOf": [{"$ref": "#/$defs/a"}]},
        [{"b": 1, "a": 1}],
        [{"b": 1, "z": 1}],
    ),
    "oneOf": (
        _PETS,
        [{"kind": "cat", "lives": 9}, {"kind": "dog", "good": True}],
        [{"kind": "cat", "good": True}, {"kind": "dog", "lives": 1}, {"kind": "dog", "z": 1}],
    ),
    "properties and oneOf": (
        {**_PETS, "type": "object", "properties": {"name": {"type": "string"}}},
        [{"kind": "cat", "lives": 9, "name": "x"}, {"kind": "dog", "good": True}],
        [{"kind": "cat", "good": True}, {"kind": "dog", "name": "x", "z": 1}],
    ),
    "anyOf of required": (
        {"type": "object", "properties": {"a": True, "b": True}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}, {"a": 1, "z": 1}],
    ),
    "nullable": ({"anyOf": [_A, {"type": "null"}]}, [None, {"a": 1}], [{"b": 1}]),
    "recursive": (
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        [{"next": {"next": None}}],
        [{"next": {"next": None, "z": 1}}],
    ),
    "one branch is open": (
        {"anyOf": [_A, {**_B, "additionalProperties": True}]}, [{"a": 1}, {"b": 1, "z": 1}], [{"a": 1, "z": 1}]
    ),
}  # fmt: skip
OPEN_SCHEMAS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "additionalProperties": ({**_A, "additionalProperties": True}, [{"a": 1, "z": 1}]),
    "unevaluatedProperties": ({**_A, "unevaluatedProperties": True}, [{"z": 1}]),
    "in a part": ({"allOf": [_A, {"additionalProperties": {"type": "integer"}}]}, [{"a": 1, "z": 1}]),
    "a map": ({"type": "object"}, [{"z": 1}]),
    "required only": ({"type": "object", "required": ["a"]}, [{"a": 1, "z": 1}]),
    "patternProperties": ({**_A, "patternProperties": {"^x": True}}, [{"a": 1, "z": 1}, {"x": 1}]),
    "more than are named": ({**_A, "required": ["a"], "minProperties": 2}, [{"a": 1, "z": 1}]),
    "a constant": ({**_A, "const": {"z": 1}}, [{"z": 1}]),
}
LOOSE_SCHEMAS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "if": (
        {**_A, "if": {"required": ["a"]}, "then": {"$ref": "#/$defs/b"}, "else": {"properties": {"c": True}},
         "$defs": {"b": _B}},
        [{"a": 1, "b": 1}, {"c": 1}], [{"z": 1}],
    ),
    "dependencies": (
        {**_A, "dependentRequired": {"a": ["x"]}, "dependentSchemas": {"a": {"properties": {"y": True}}},
         "dependencies": {"a": {"required": ["w"]}}},
        [{"a": 1, "y": 1, "x": 1, "w": 1}], [{"z": 1}],
    ),
    "unknown names": ({**_A, "allOf": [{"$ref": "https://example.com/x"}]}, [{"a": 1, "z": 1}], [{"a": "x"}]),
    "propertyNames": ({**_A, "propertyNames": {"maxLength": 1}}, [{"a": 1, "z": 1}], []),
}  # fmt: skip


_ONLY_A = {"patternProperties": {"^a$": {"type": "integer"}}, "additionalProperties": False}
_AB = {"patternProperties": {"^(a|b)$": True}, "additionalProperties": False}
COMPLETE: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "required": ({"type": "object", **_ONLY_A, "required": ["a"]}, [{"a": 1}], [{}, {"a": "x"}, {"b": 1}]),
    "declared": (
        {"type": "object", **_ONLY_A, "properties": {"a": {"minimum": 3}}},
        [{}, {"a": 3}],
        [{"a": 2}, {"b": 1}],
    ),
    "both": ({"type": "object", **_AB, "properties": {"a": True}, "required": ["b"]}, [{"a": 1, "b": 1}], [{"a": 1}]),
    "nested": ({"prefixItems": [{"type": "object", **_ONLY_A, "required": ["a"]}]}, [[{"a": 1}]], [[{"a": "x"}]]),
    "one name is left": (
        {"type": "object", **_AB, "required": ["a"]},
        [{"a": 1, "b": 1}],
        [{"b": 1}, {"a": 1, "c": 1}],
    ),
}
"""Objects that may have all names that their patterns match."""


@pytest.mark.parametrize("name", COMPLETE)
@pytest.mark.parametrize("is_open", [None, True])
def test_an_object_with_all_names_that_match_ends(name: str, is_open: bool | None) -> None:
    schema, right, wrong = COMPLETE[name]
    grammar = grammar_of(JsonSchema(schema, "schema", replace(BOUNDED, is_open=is_open)), "schema")
    assert all(accepts(grammar, text) for text in _texts(right))
    assert not any(accepts(grammar, text) for text in _texts(wrong))
    if name != "one name is left":
        assert not begins(grammar, json.dumps(right[-1])[: -2 if name == "nested" else -1] + ",")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "allOf": [_ONLY_A, {"required": ["a"]}]},
        {"type": "object", "$ref": "#/$defs/x", "required": ["a"], "$defs": {"x": _ONLY_A}},
        {"type": "object", **_ONLY_A, "anyOf": [{"required": ["a"]}, {"maxProperties": 0}]},
    ],
)
def test_what_cannot_be_rewritten_is_refused_or_reported(schema: dict[str, Any]) -> None:
    with pytest.raises(ConstraintError, match="patternProperties: The patterns match only"):
        JsonSchema(schema, "schema").fragment("")
    fragment = JsonSchema(schema, "schema", is_strict=False).fragment("")
    assert "schema.patternProperties" in [notice.path for notice in fragment.notices]
    assert accepts(whole(fragment), '{"a": 1}')


def _texts(values: list[Any]) -> list[str]:
    return [json.dumps(value) for value in values]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("name", CLOSED_SCHEMAS)
def test_other_properties_are_not_allowed(name: str) -> None:
    schema, right, wrong = CLOSED_SCHEMAS[name]
    fragment = JsonSchema(schema, "schema").fragment("")
    assert [(notice.path, notice.reason) for notice in fragment.notices] == [("schema", CLOSED)]
    grammar = whole(fragment)
    assert all(accepts(grammar, text) for text in _texts(right))
    assert not any(accepts(grammar, text) for text in _texts(wrong))
    for text in filter(None, (walk(grammar, seed, limit=300) for seed in range(5))):
        Draft202012Validator(schema).validate(json.loads(text, object_pairs_hook=_unique))


@pytest.mark.parametrize("name", CLOSED_SCHEMAS)
def test_a_request_may_open_all_objects_or_none(name: str) -> None:
    schema, right, wrong = CLOSED_SCHEMAS[name]
    opened = JsonSchema(schema, "schema", replace(BOUNDED, is_open=True)).fragment("")
    closed = JsonSchema(schema, "schema", replace(BOUNDED, is_open=False)).fragment("")
    assert opened.notices == closed.notices == ()
    valid = Draft202012Validator(schema).is_valid
    for value in (*right, *wrong):
        assert accepts(whole(opened), json.dumps(value)) == valid(value)
    assert not any(accepts(whole(closed), text) for text in _texts(wrong))


@pytest.mark.parametrize("name", OPEN_SCHEMAS)
def test_a_schema_that_says_so_stays_open(name: str) -> None:
    schema, right = OPEN_SCHEMAS[name]
    fragment = JsonSchema(schema, "schema").fragment("")
    assert fragment.notices == ()
    assert all(accepts(whole(fragment), text) for text in _texts(right))


@pytest.mark.parametrize("name", LOOSE_SCHEMAS)
def test_names_in_parts_that_are_not_enforced_are_allowed(name: str) -> None:
    schema, right, wrong = LOOSE_SCHEMAS[name]
    grammar = whole(JsonSchema(schema, "schema", is_strict=False).fragment(""))
    assert all(accepts(grammar, text) for text in _texts(right))
    assert not any(accepts(grammar, text) for text in _texts(wrong))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({}, [{}], [{"z": 1}]),
        ({"type": "object"}, [{}], [{"z": 1}]),
        ({"type": "object", "required": ["a"]}, [{"a": 1}], [{"a": 1, "z": 1}]),
        ({"$ref": "#/$defs/a", "$defs": {"a": _A}}, [{"a": 1}], [{"z": 1}]),
        ({"anyOf": [_A, _B]}, [{"a": 1}, {"b": 1}], [{"z": 1}]),
        ({"type": "object", "patternProperties": {"^x": True}}, [{"z": 1}], []),
        ({"additionalProperties": {"type": "integer"}}, [{"z": 1}], [{"z": "1"}]),
    ],
)
def test_a_call_has_no_arguments_that_its_tool_does_not_name(
    schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    tool = OfferedTool("f", schema, "tool")
    grammar = whole(tool.arguments())
    assert all(accepts(grammar, text) for text in _texts(right))
    assert not any(accepts(grammar, text) for text in _texts(wrong))
    opened = OfferedTool("f", schema, "tool", is_open=True)
    assert accepts(whole(opened.arguments()), '{"b": 1, "z": 1}' if "required" not in schema else '{"a": 1, "z": 1}')
    assert [notice.path for notice in tool.left_out] == (["tool"] if {"z": 1} in wrong or "required" in schema else [])
    assert opened.left_out == []


def test_large_objects_of_several_schemas_are_closed_with_few_words() -> None:
    big = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(300)}}
    one = {"allOf": [{"$ref": "#/$defs/big"}]}
    schema = {"$defs": {"big": big}, "type": "object", "properties": {f"q{number}": one for number in range(300)}}
    assert len(grammar_of(JsonSchema(schema, "schema"), "schema")) < 100_000
    some = {"anyOf": [{"required": [f"p{number}"]} for number in range(50)], **big}
    assert len(grammar_of(JsonSchema(some, "schema"), "schema")) < 100_000
