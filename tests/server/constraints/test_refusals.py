"""Constraints that cannot be enforced are refused by their path; ones that would take too long, at once."""

import tracemalloc
from typing import Any

import pytest

from server.generation.constraints.check import grammar_error, grammar_of
from server.generation.constraints.fragment import ConstraintError, whole
from server.generation.constraints.json_schema import JsonSchema, read_schema
from tests.server.constraints.matching import accepts
from tests.server.constraints.schemas import SCHEMAS

REFUSED: list[tuple[Any, str]] = [
    ({"not": {"type": "null"}}, "not"),
    ({"if": {}, "then": {"type": "null"}}, "if"),
    ({"if": {}}, "if"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"propertyNames": {"minLength": 3}}, "propertyNames"),
    ({"properties": {"a": {}}, "propertyNames": {"pattern": "a"}}, "propertyNames"),
    ({"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "propertyNames"),
    ({"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"minLength": 2}}}, "propertyNames"),
    ({"propertyNames": {"$ref": "https://example.com/names"}}, "propertyNames"),
    ({"items": {"$id": "https://example.com/i", "propertyNames": {"$ref": "#"}}}, "items.propertyNames"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"dependentSchemas": {"a": {}}}, "dependentSchemas"),
    ({"dependencies": {"a": ["b"]}}, "dependencies"),
    ({"allOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"unevaluatedItems": False}, "unevaluatedItems"),
    ({"$dynamicRef": "#x"}, "$dynamicRef"),
    ({"$recursiveRef": "#"}, "$recursiveRef"),
    (
        {"properties": {"items": {"prefixItems": [{}, {}, {"pattern": "(?=a)"}]}}},
        "properties.items.prefixItems[2].pattern",
    ),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"items": {"format": "iri"}}}}, "$defs.x.items.format"),
    ({"format": "password"}, "format"),
    ({"type": "any"}, "type"),
    ({"type": []}, "type"),
    ({"enum": []}, "enum"),
    ({"enum": "ab"}, "enum"),
    ({"enum": [1, [10**30]]}, "enum[1][0]"),
    ({"const": float("nan")}, "const"),
    ({"const": "\ud800"}, "const"),
    ({"const": 2**53 + 1}, "const"),
    ({"const": 2**63}, "const"),
    *(
        ({keyword: 10**400}, keyword)
        for keyword in ("minimum", "exclusiveMinimum", "multipleOf", "minLength", "minItems")
    ),
    ({"maximum": -(10**400)}, "maximum"),
    ({"minProperties": 10**400}, "minProperties"),
    ({"const": 10**400}, "const"),
    ({"enum": [10**400]}, "enum[0]"),
    ({"const": ["a\x07"]}, "const[0]"),
    ({"enum": ["\x7f"]}, "enum[0]"),
    ({"pattern": "^a\\x07b$"}, "pattern"),
    ({"pattern": "[\\x00-\\x02]"}, "pattern"),
    ({"required": True}, "required"),
    ({"properties": []}, "properties"),
    ({"properties": {"a": 3}}, "properties.a"),
    ({"items": "x"}, "items"),
    ({"minLength": -1}, "minLength"),
    ({"minLength": 1.5}, "minLength"),
    ({"minItems": 10**9}, "minItems"),
    ({"minimum": "3"}, "minimum"),
    ({"minimum": True}, "minimum"),
    ({"minimum": 2**64}, "minimum"),
    ({"exclusiveMaximum": -(2**64)}, "exclusiveMaximum"),
    ({"multipleOf": 0}, "multipleOf"),
    ({"multipleOf": 7, "minimum": 2**60, "maximum": 2**60}, "multipleOf"),
    ({"type": ["integer", "number"], "minimum": -20, "maximum": -20}, ""),
    ({"multipleOf": 0.12345}, "multipleOf"),
    ({"pattern": "a(?!b)"}, "pattern"),
    ({"pattern": "(a)\\1"}, "pattern"),
    ({"patternProperties": {"(": {}}}, "patternProperties.("),
    ({"patternProperties": {"a": {}, "b": {}}}, "patternProperties"),
    ({"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
    ({"properties": {"a": {}}, "additionalProperties": False, "minProperties": 2}, "minProperties"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]}, "oneOf"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
    (
        {"$defs": {"a": {"required": ["k"], "properties": {"k": {"const": 1}}}}, "oneOf": [{"$ref": "#/$defs/a"}] * 2},
        "oneOf",
    ),
    ({"anyOf": []}, "anyOf"),
    ({"$ref": "https://example.com/other.json"}, "$ref"),
    ({"$ref": "#/$defs/none"}, "$ref"),
    ({"$ref": "#none"}, "$ref"),
    ({"$ref": 3}, "$ref"),
    ({"properties": {"a": {"$id": "x", "items": {"$ref": "#"}}}}, "properties.a.items.$ref"),
    ({"type": "string", "const": 1}, ""),
    (False, ""),
    (3, ""),
    (None, ""),
]


def _nested(levels: int, inner: Any = True) -> Any:
    for _ in range(levels):
        inner = {"type": "array", "items": inner}
    return inner


def _chain(levels: int, link: Any, last: Any, **beside: Any) -> dict[str, Any]:
    """Definitions of which each refers to the next one, in the way that `link` says."""
    definitions = {f"d{level}": link({"$ref": f"#/$defs/d{level + 1}"}) for level in range(levels)}
    return {"$defs": {**definitions, f"d{levels}": last}, "$ref": "#/$defs/d0", **beside}


def _object(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, True)}


_A_IN_A = {"properties": {"a": {"$ref": "#/$defs/a"}}}
BOMBS: dict[str, Any] = {
    "deep": _nested(100),
    "deeper": _nested(900),
    "deep_constant": {"const": [[[[_nested(70)]]]]},
    "enum": {"enum": [str(number) for number in range(10_001)]},
    "huge_enum": {"enum": [str(number) for number in range(300_000)]},
    "enums": {"properties": {str(number): {"enum": list(range(9_000))} for number in range(9)}},
    "large_constant": {"const": [0] * 100_000},
    "long_text": {"const": "x" * 2_000_000},
    "optional": _object(*map(str, range(401))),
    "many_optional": _object(*map(str, range(10_000))),
    "optional_in_parts": {"allOf": [_object(*(f"{part}_{name}" for name in range(50))) for part in range(10)]},
    "nodes": {"type": "object", "properties": {str(number): _object(*map(str, range(200))) for number in range(200)}},
    "multiple": {"type": "integer", "multipleOf": 999_983},
    "multiples_of_all": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
    "multiples_of_any": {"anyOf": [{"multipleOf": 9973}, {"type": "null"}, {"multipleOf": 9967}]},
    "multiples_of_one": {"oneOf": [{"type": "integer", "multipleOf": 9973}, {"type": "null", "multipleOf": 9967}]},
    "counts": {"pattern": "(x{1000}){1000}"},
    "count": {"pattern": "x{10001}"},
    "endless_count": {"pattern": "(?:x{5000,}){5000,}"},
    "huge_count": {"pattern": "x{99999999999999999999999999}"},
    "patterns": {"properties": {str(number): {"pattern": f"{number}x{{5000}}"} for number in range(50)}},
    "groups": {"pattern": "(" * 5_000 + ")" * 5_000},
    "alternatives": {"allOf": [{"anyOf": [_object(f"a{number}"), _object(f"b{number}")]} for number in range(14)]},
    "one_ofs": {"oneOf": [{"type": "object", "required": [str(number)]} for number in range(3_000)]},
    "unions": {
        "$defs": {"a": _object(*map(str, range(300)))},
        "properties": {str(number): {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]} for number in range(100)},
    },
    "members": {"oneOf": [{"type": "object", "properties": {"k": {"const": str(n)}}} for n in range(300)]},
    "anchors": {"items": {"prefixItems": [{"pattern": f"a{number}^b"} for number in range(9_000)]}},
    "loop": {"$ref": "#"},
    "loop_in_any_of": {"anyOf": [{"type": "string"}, {"$ref": "#"}]},
    "loop_of_two": {"allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": {"anyOf": [{"$ref": "#"}]}}},
    "endless_object": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "endless_array": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "endless_part": {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {**_object(), "required": ["a"], **_A_IN_A}}},
    "doubling": _chain(40, lambda link: {"allOf": [link, link]}, {"type": "object"}),
    "doubling_alternatives": _chain(40, lambda link: {"anyOf": [link, link]}, {"type": "null"}, type=["null"]),
    "chain": _chain(9_000, lambda link: link, True),
}


def refusal(schema: Any) -> ConstraintError:
    with pytest.raises(ConstraintError) as caught:
        grammar_of(JsonSchema(schema, "schema"), "schema")
    return caught.value


@pytest.mark.parametrize(("schema", "path"), REFUSED, ids=str)
def test_a_refusal_names_the_path(schema: Any, path: str) -> None:
    error = refusal(schema)
    assert error.path == ("schema." + path if path else "schema")
    assert error.reason
    assert "\n" not in error.reason


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str) -> None:
    tracemalloc.start()
    refusal(BOMBS[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_defused_where_schemas_are_not_strict(name: str) -> None:
    fragment = JsonSchema(BOMBS[name], "schema", is_strict=False).fragment("")
    assert 1 <= len(fragment.notices) <= 102
    assert grammar_error(whole(fragment)) is None


@pytest.mark.parametrize(("schema", "path"), REFUSED, ids=str)
def test_what_is_not_strict_is_left_out_and_told(schema: Any, path: str) -> None:
    fragment = JsonSchema(schema, "schema", is_strict=False).fragment("")
    assert ("schema." + path if path else "schema") in {notice.path for notice in fragment.notices}
    assert grammar_error(whole(fragment)) is None


def test_what_is_left_out_forbids_nothing() -> None:
    schema = {"type": "object", "patternProperties": {"a(?=b)": {}, "(": {}}, "additionalProperties": False}
    fragment = JsonSchema({**schema, "not": {}, "required": ["x"]}, "schema", is_strict=False).fragment("")
    grammar = whole(fragment)
    assert accepts(grammar, '{"x":1,"ab":2}')
    assert not accepts(grammar, "{}")


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_can_be_enforced_is_so_without_being_strict(name: str) -> None:
    assert read_schema(SCHEMAS[name], "schema", strict=False) == read_schema(SCHEMAS[name], "schema")


def test_large_schemas_of_every_kind_compile() -> None:
    schemas = [
        _nested(60),
        _object(*map(str, range(400))),
        {"enum": [f"value {number}" for number in range(10_000)]},
        {"type": "integer", "multipleOf": 10_000},
        {"pattern": "^[ab]{10000}$"},
        {"type": "array", "maxItems": 10**6, "items": {"type": "string", "maxLength": 10**9}},
        {"anyOf": [_object(str(number)) for number in range(1_500)]},
        {"allOf": [{"anyOf": [_object(f"a{number}"), _object(f"b{number}")]} for number in range(8)]},
        {"type": "array", "prefixItems": [{"type": "integer", "maximum": number} for number in range(5_000)]},
        {"oneOf": [{**_object("k"), "properties": {"k": {"const": str(n)}}, "required": ["k"]} for n in range(200)]},
        _chain(100, lambda link: link, {"type": "null"}),
    ]
    for schema in schemas:
        grammar_of(JsonSchema(schema, "schema"), "schema")


def test_a_maximum_beyond_all_numbers_leaves_all_of_them():
    beyond = {
        "maximum": 10**400,
        "minimum": -(10**400),
        "maxLength": 10**400,
        "maxItems": 10**400,
        "maxProperties": 10**400,
    }
    grammar = grammar_of(JsonSchema(beyond, "schema"), "schema")
    for value in ("7", "-7", '"abc"', "[1, 2]", '{"a": 1}'):
        assert accepts(grammar, value)


def test_a_grammar_with_a_multiple_beyond_all_numbers_is_too_large():
    assert grammar_error('start: %json {"type": "integer", "multipleOf": ' + "9" * 400 + "}") is not None
