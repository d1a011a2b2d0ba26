"""Schemas that can be enforced, of the kinds that clients send."""

from typing import Any

_TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["value"],
    "additionalProperties": False,
}
_PYDANTIC = {
    "$defs": {
        "Address": {
            "description": "Where it is.",
            "properties": {
                "street": {"title": "Street", "type": "string"},
                "zip": {"anyOf": [{"pattern": "^\\d{5}$", "type": "string"}, {"type": "null"}], "default": None},
            },
            "required": ["street"],
            "title": "Address",
            "type": "object",
        },
        "Color": {"enum": ["red", "green"], "title": "Color", "type": "string"},
    },
    "properties": {
        "name": {"maxLength": 20, "minLength": 1, "title": "Name", "type": "string"},
        "age": {"exclusiveMinimum": 0, "title": "Age", "type": "integer"},
        "address": {"$ref": "#/$defs/Address", "description": "Home."},
        "colors": {"items": {"$ref": "#/$defs/Color"}, "title": "Colors", "type": "array"},
    },
    "required": ["name", "age", "address"],
    "title": "Person",
    "type": "object",
}
_PYDANTIC_UNION = {
    "$defs": {
        "Cat": {
            "properties": {"kind": {"const": "cat", "title": "Kind", "type": "string"}, "lives": {"type": "integer"}},
            "required": ["kind", "lives"],
            "type": "object",
        },
        "Dog": {
            "properties": {"kind": {"const": "dog", "title": "Kind", "type": "string"}, "good": {"type": "boolean"}},
            "required": ["kind"],
            "type": "object",
        },
    },
    "properties": {
        "pet": {
            "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "title": "Pet",
        }
    },
    "required": ["pet"],
    "type": "object",
}
_ZOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        "id": {"type": "string", "format": "uuid", "pattern": "^[0-9a-f-]+$"},
        "tags": {"minItems": 1, "maxItems": 3, "type": "array", "items": {"type": "string"}},
        "map": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["count", "tags", "maybe"],
    "additionalProperties": False,
}
_ZOD_3 = {
    "$ref": "#/definitions/answer",
    "definitions": {
        "answer": {
            "type": "object",
            "properties": {
                "first": {"type": ["string", "null"], "enum": ["a", "b", None]},
                "second": {"type": "array", "items": [{"type": "string"}, {"type": "number"}], "minItems": 2},
                "third": {"$ref": "#/definitions/answer/properties/first"},
            },
            "required": ["first", "second"],
            "additionalProperties": False,
        }
    },
    "$schema": "http://json-schema.org/draft-07/schema#",
}
_OPENAI_STRICT = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                "required": ["explanation", "output"],
                "additionalProperties": False,
            },
        },
        "final_answer": {"type": "string"},
    },
    "required": ["steps", "final_answer"],
    "additionalProperties": False,
}

SCHEMAS: dict[str, dict[str, Any] | bool] = {
    "anything": True,
    "empty": {},
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "string": {"type": "string"},
    "nullable": {"type": ["string", "null"]},
    "type_list": {"type": ["integer", "boolean", "array"], "items": {"type": "null"}},
    "bounded_integer": {"type": "integer", "minimum": -5, "maximum": 120},
    "exclusive_bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "old_exclusive_bound": {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
    "largest_bounds": {"type": "integer", "minimum": 2**60 + 1, "maximum": 2**64 - 1},
    "untyped_bound": {"minimum": 5},
    "multiple": {"type": "integer", "multipleOf": 7},
    "multiple_of_fraction": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 100},
    "bounded_string": {"type": "string", "minLength": 2, "maxLength": 5.0},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d+$"},
    "loose_pattern": {"type": "string", "pattern": "x|y$", "maxLength": 8},
    "date": {"type": "string", "format": "date"},
    "date_time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ip": {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]},
    "email": {"type": "string", "format": "email"},
    "format_of_number": {"type": "integer", "format": "int32"},
    "enum": {"enum": ["a", 'quo"te', 1, 2.5, None, True, {"k": [1]}, []]},
    "typed_enum": {"type": "string", "enum": ["a", "b", 3]},
    "const": {"const": {"a": [1, {"b": "<|end|>"}]}},
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "integer"}],
        "items": False,
        "minItems": 2,
    },
    "open_tuple": {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "null"}},
    "old_tuple": {"type": "array", "items": [{"type": "boolean"}], "additionalItems": {"type": "null"}},
    "no_unique_items": {"type": "array", "items": {"type": "null"}, "uniqueItems": False},
    "object": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]},
    "closed_object": {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
    "no_more_properties": {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": False},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
    "at_least_one": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "minProperties": 1,
        "additionalProperties": False,
    },
    "pattern_properties": {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "patternProperties": {"^x-": {"type": "string"}, "^y": {"type": "null"}},
        "additionalProperties": False,
    },
    "required_undeclared": {"type": "object", "required": ["z"], "additionalProperties": {"type": "boolean"}},
    "listed_names": {
        "type": "object",
        "propertyNames": {"type": "string", "title": "Letter", "enum": ["a", "b"]},
        "additionalProperties": {"type": "integer"},
    },
    "pattern_of_names": {"type": "object", "propertyNames": {"pattern": '^[^"a]$'}, "required": ["z"]},
    "referenced_names": {
        "type": "object",
        "properties": {
            "listed": {"propertyNames": {"$ref": "#/$defs/Alias"}, "additionalProperties": {"type": "integer"}},
            "matched": {"propertyNames": {"$ref": "#/$defs/Short"}},
            "only": {"propertyNames": {"const": "a"}, "additionalProperties": {"type": "null"}},
            "any": {"propertyNames": {"$ref": "#/$defs/Name"}, "additionalProperties": {"type": "null"}},
        },
        "$defs": {
            "Alias": {"title": "Alias", "$ref": "#/$defs/Letter"},
            "Letter": {"type": "string", "title": "Letter", "enum": ["a", "b"]},
            "Short": {"type": "string", "pattern": "^[a-c]$"},
            "Name": {"type": "string", "title": "Name"},
        },
    },
    "forbidden_property": {"type": "object", "properties": {"a": False, "b": {"type": "null"}}},
    "odd_names": {
        "type": "object",
        "properties": {'"\\/\n\u00e9<|end|>': {"type": "null"}, "": {"type": "null"}},
        "required": ["", '"\\/\n\u00e9<|end|>'],
        "additionalProperties": False,
    },
    "any_of": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]},
    "any_of_beside": {"type": "string", "anyOf": [{"maxLength": 2}, {"pattern": "^long"}]},
    "any_of_objects": {
        "anyOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
        ]
    },
    "all_of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 9}, "b": {"type": "null"}}},
        ]
    },
    "one_of_types": {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
    "one_of_constants": {"oneOf": [{"const": 1, "title": "one"}, {"const": 2}, {"enum": ["a", "b"]}]},
    "one_of_parts": {
        "$defs": {"base": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}},
        "oneOf": [
            {
                "allOf": [
                    {"$ref": "#/$defs/base"},
                    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]},
                ]
            }
            for kind in ("a", "b")
        ],
    },
    "one_of_closed": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"a": {"type": "null"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"b": {"type": "null"}},
                "required": ["b"],
                "additionalProperties": False,
            },
        ]
    },
    "one_of_and_any_of": {"oneOf": [{"type": "integer"}, {"type": "null"}], "anyOf": [{"maximum": 3}]},
    "recursive": _TREE,
    "mutually_recursive": {
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "additionalProperties": False},
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}},
        },
        "$ref": "#/$defs/a",
    },
    "linked_list": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "anchor": {"type": "array", "items": {"$ref": "#item"}, "$defs": {"x": {"$anchor": "item", "type": "null"}}},
    "escaped_pointer": {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"type": "boolean"}}},
    "absolute_reference": {
        "$id": "https://example.com/s.json",
        "type": "array",
        "items": {"$ref": "https://example.com/s.json#/$defs/x"},
        "$defs": {"x": {"type": "null"}},
    },
    "annotations": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/s.json",
        "$comment": "none",
        "title": "T",
        "description": "D",
        "default": 3,
        "examples": [3],
        "deprecated": True,
        "readOnly": True,
        "encrypted": True,
        "x-guidance": {"lenient": True},
        "type": "integer",
    },
    "pydantic": _PYDANTIC,
    "pydantic_union": _PYDANTIC_UNION,
    "zod": _ZOD,
    "zod_3": _ZOD_3,
    "openai_strict": _OPENAI_STRICT,
}

BOMB = {
    "type": "object",
    "allOf": [{"properties": {"a": {"type": "string", "pattern": f"{number:03}"}}} for number in range(40)],
}
"""Takes more memory than any machine has to compile, and looks small: each pattern is of another object."""
