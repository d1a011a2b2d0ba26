"""A schema's grammar accepts exactly what jsonschema considers valid."""

import json
import re
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from server.generation.constraints.check import grammar_of
from server.generation.constraints.json_schema import BOUNDED, JsonObject, JsonSchema, JsonStyle, read_whitespace
from tests.server.constraints.matching import accepts, begins, walk
from tests.server.constraints.schemas import SCHEMAS

OPEN = replace(BOUNDED, is_open=True)
INSTANCES: dict[str, list[Any]] = {
    "integer": [0, -7, 10**30],
    "largest_bounds": [2**60, 2**60 + 256, 2**63 - 1, 2**63],
    "bounded_string": ["a", "ab", "äöü€😀", "abcdef", 'q"\\\n'],
    "pattern": ["AB-1", "AB-", "xAB-1", "AB-1x"],
    "loose_pattern": ["axb", "ay", "ya", "xy", ""],
    "date": ["2024-02-29", "2023-02-29", "2000-02-29", "1900-02-29", "2023-04-31", "2023-04-30", "23-04-30"],
    "date_time": ["2024-02-29T10:00:00Z", "2023-02-29T10:00:00Z"],
    "ip": ["1.2.3.4", "::1", "1.2.3", "256.1.1.1", "g::"],
    "enum": ["a", 'quo"te', 1, 2.5, {"k": [1]}, {"k": [2]}, [], [1], "b", False],
    "typed_enum": ["a", 3, "c"],
    "const": [{"a": [1, {"b": "<|end|>"}]}, {"a": [1, {"b": "x"}]}, {}],
    "referenced_names": [
        {"listed": {"a": 1, "b": 2}, "matched": {"c": []}, "only": {"a": None}, "any": {"zz": None}},
        *({field: {"zz": 1}} for field in ("listed", "matched", "only")),
    ],
    "multiple": [14, 15, 0, -7],
    "multiple_of_fraction": [0.5, 0.25, 100, 100.5],
    "tuple": [["a", 1], ["a"], ["a", 1, 2], [1, "a"]],
    "old_tuple": [[True], [True, None], [1], [True, 1]],
    "object": [{}, {"a": 1}, {"a": 1, "c": "x"}, {"a": 1, "b": [], "c": 1}, {"a": "1"}],
    "no_more_properties": [{}, {"a": None}, {"b": 1}],
    "map": [{}, {"x": 1}, {"x": 1, "y": 2}, {"x": 1, "y": 2, "z": 3}, {"x": "1"}],
    "at_least_one": [{}, {"a": None}, {"b": None}, {"a": None, "b": None}],
    "pattern_properties": [{"id": 1, "x-a": "s"}, {"x-a": 1}, {"yy": None}, {"z": None}],
    "listed_names": [{}, {"a": 1}, {"a": 1, "b": 2}, {"a": "x"}, {"c": 1}],
    "pattern_of_names": [{"z": 1}, {"z": 1, "y": None}, {"z": 1, "a": 1}, {"z": 1, '"': 1}, {"y": 1}],
    "forbidden_property": [{"a": 1}, {"b": None}, {"c": 1}],
    "any_of_beside": ["ab", "longer", "other"],
    "any_of_objects": [{"a": 1}, {"b": "x"}, {"a": "x"}, {"c": 1}],
    "all_of": [{"a": 9}, {"a": 10}, {"a": 1, "b": None}, {"a": 1, "b": 1}],
    "one_of_and_any_of": [3, 4, None],
    "recursive": [
        {"value": 1},
        {"value": 1, "children": [{"value": 2, "children": []}]},
        {"value": 1, "children": [1]},
    ],
    "linked_list": [{"next": {"next": None}}, {"next": {}}, {"next": 1}],
    "pydantic": [
        {"name": "A", "age": 3, "address": {"street": "x", "zip": "12345"}, "colors": ["red"]},
        {"name": "A", "age": 3, "address": {"street": "x", "zip": "1234"}},
        {"name": "", "age": 3, "address": {"street": "x"}},
        {"name": "A", "age": 0, "address": {"street": "x"}},
    ],
    "pydantic_union": [{"pet": {"kind": "cat", "lives": 9}}, {"pet": {"kind": "dog"}}, {"pet": {"kind": "cat"}}],
    "zod": [
        {"count": -9007199254740991, "tags": ["a"], "maybe": None},
        {"count": -9007199254740992, "tags": ["a"], "maybe": None},
        {"count": 1, "tags": [], "maybe": None},
        {"count": 1, "tags": ["a"], "map": {"k": 1.5}, "maybe": "x"},
        {"count": 1, "tags": ["a"], "map": {"k": "x"}, "maybe": "x"},
    ],
    "zod_3": [{"first": None, "second": ["a", 1]}, {"first": "c", "second": ["a", 1]}, {"first": "a", "second": ["a"]}],
}
OF_ALL_TYPES = [None, True, 0, 4, -6, 130, 0.5, 2**60, "", "a", "xyz", [], [None], [1, "a"], {}, {"a": 1}, {"z": True}]


FORMATS = FormatChecker()


@FORMATS.checks("date-time", raises=ValueError)
def is_date_time(value: object) -> bool:
    """jsonschema itself has no check of it."""
    return not isinstance(value, str) or bool(date.fromisoformat(value[:10]) and re.match("[Tt ][0-9]{2}:", value[10:]))


def oracle(schema: dict[str, Any] | bool) -> Validator:
    made = validator_for(schema, default=Draft202012Validator)
    if schema == SCHEMAS["old_exclusive_bound"]:
        schema = {"type": "integer", "exclusiveMinimum": 3}
    if schema == SCHEMAS["old_tuple"]:
        schema = {"type": "array", "prefixItems": schema["items"], "items": schema["additionalItems"]}
    if schema == SCHEMAS["largest_bounds"]:  # a double further in on both sides
        schema = {"type": "integer", "minimum": 2**60 + 256, "maximum": 2**63 - 1024}
    return made(schema, format_checker=FORMATS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_generated_is_valid(name: str) -> None:
    grammar = grammar_of(JsonSchema(SCHEMAS[name], "schema"), "schema")
    validator = oracle(SCHEMAS[name])
    ended = 0
    for seed in range(6):
        text = walk(grammar, seed)
        if text is not None:
            ended += 1
            validator.validate(json.loads(text))
    assert ended


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_instance_is_accepted_if_it_is_valid(name: str) -> None:
    grammar = grammar_of(JsonSchema(SCHEMAS[name], "schema", OPEN), "schema")
    validator = oracle(SCHEMAS[name])
    for instance in [*OF_ALL_TYPES, *INSTANCES.get(name, ())]:
        text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
        assert accepts(grammar, text) == validator.is_valid(instance), text


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
def test_compact_and_indented_texts_fit(indent: int | str | None) -> None:
    value = {"value": 1, "children": [{"value": 2, "children": [{"value": 3, "children": []}]}, {"value": 4}]}
    grammar = grammar_of(JsonSchema(SCHEMAS["recursive"], "schema"), "schema")
    assert accepts(grammar, json.dumps(value, indent=indent))
    assert accepts(grammar, json.dumps(value, indent=indent).replace("\n", "\r\n"))
    assert accepts(grammar, json.dumps(value, indent=indent, separators=(",", ":")))
    assert accepts(grammar_of(JsonObject(), "format"), json.dumps(value, indent=indent))


def test_whitespace_does_not_run_on() -> None:
    grammar = grammar_of(JsonObject(), "format")
    assert begins(grammar, "{" + " " * 8)
    assert not begins(grammar, "{" + " " * 9)
    assert begins(grammar, "{\n" + " " * 32)
    assert not begins(grammar, "{\n" + " " * 33)
    assert not begins(grammar, "{\n\n")


def test_whitespace_can_be_forbidden_or_a_clients_own() -> None:
    none = grammar_of(JsonObject(JsonStyle(None)), "format")
    assert accepts(none, '{"a":[1,2]}')
    assert not accepts(none, '{"a": [1,2]}')
    own = grammar_of(JsonObject(JsonStyle(read_whitespace("[ ]?", "whitespace_pattern"))), "format")
    assert accepts(own, '{"a": [1, 2]}')
    assert not accepts(own, '{"a":  [1, 2]}')
    assert not accepts(own, '{\n"a":1}')


def test_an_object_is_an_object() -> None:
    grammar = grammar_of(JsonObject(), "format")
    for text in ("{}", '{"a":{"b":[1,"x",null]}}', '{"a": 1, "b": true}'):
        assert accepts(grammar, text)
    for text in ("[]", "1", '"{}"', "{'a':1}", "{a:1}", '{"a":1,}', " {}", "{} ", ""):
        assert not accepts(grammar, text)


def test_properties_come_in_the_schemas_order() -> None:
    schema = {"type": "object", "properties": {"z": {"type": "null"}, "a": {"type": "null"}}}
    grammar = grammar_of(JsonSchema(schema, "schema"), "schema")
    assert accepts(grammar, '{"z":null,"a":null}')
    assert not accepts(grammar, '{"a":null,"z":null}')


def test_a_declared_name_cannot_come_again_in_another_spelling() -> None:
    grammar = grammar_of(JsonSchema(SCHEMAS["object"], "schema"), "schema")
    assert not accepts(grammar, '{"a":1,"\\u0061":"x"}')
    assert not accepts(grammar, '{"a":1,"a":"x"}')


def test_a_special_token_in_a_constant_is_only_its_text() -> None:
    grammar = grammar_of(JsonSchema({"const": "a<|end|>b"}, "schema"), "schema")
    assert accepts(grammar, '"a<|end|>b"')
    assert walk(grammar, 0) == '"a<|end|>b"'
