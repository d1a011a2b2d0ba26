"""Whatever a random schema's grammar lets through is valid, or the schema is refused."""

import json
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from server.generation.constraints.check import grammar_of
from server.generation.constraints.fragment import ConstraintError
from server.generation.constraints.json_schema import JsonSchema
from tests.server.constraints.matching import walk

_NAMES = st.sampled_from(["a", "b", "c", 'q"', ""])
_NUMBERS = st.integers(-20, 20) | st.sampled_from([0.5, -2.25, 2**53, 2**60, -(2**62) - 1, 1e19, 1e-7, 12345.678])
_COUNTS = st.integers(0, 4)
_VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_NAMES, inner, max_size=2),
    max_leaves=4,
)
_TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
_PATTERNS = st.sampled_from(["^a", "b$", "^[a-c]{2}$", "\\d", "x|y", "^$", "."])
_NAME_PATTERNS = st.sampled_from(["^a$", "^[ab]$", "^(b|c)$", "^$", "^a", "x"])


_ALONE: dict[str, st.SearchStrategy[Any]] = {
    "enum": st.lists(_VALUES, min_size=1, max_size=3),
    "const": _VALUES,
    "minimum": _NUMBERS,
    "maximum": _NUMBERS,
    "exclusiveMinimum": _NUMBERS,
    "multipleOf": st.sampled_from([1, 2, 0.5, 7]),
    "minLength": _COUNTS,
    "maxLength": _COUNTS,
    "pattern": _PATTERNS,
    "minItems": _COUNTS,
    "maxItems": _COUNTS,
    "required": st.lists(_NAMES, max_size=2, unique=True),
    "maxProperties": _COUNTS,
    "$ref": st.sampled_from(["#", "#/$defs/x"]),
}


@st.composite
def _schemas(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    """A type, if any, and up to three more keywords: with everything at once nothing fits."""
    several = st.lists(inner, min_size=1, max_size=3)
    keywords = {
        **_ALONE,
        "prefixItems": several,
        "items": inner,
        "properties": st.dictionaries(_NAMES, inner, max_size=3),
        "patternProperties": st.dictionaries(_NAME_PATTERNS, inner, min_size=1, max_size=2),
        "additionalProperties": inner | st.just(False),
        "anyOf": several,
        "oneOf": several,
        "allOf": several,
    }
    chosen = draw(st.lists(st.sampled_from(list(keywords)), max_size=3, unique=True))
    types = draw(st.none() | _TYPES | st.lists(_TYPES, min_size=1, max_size=3))
    return {**({} if types is None else {"type": types}), **{keyword: draw(keywords[keyword]) for keyword in chosen}}


SCHEMAS = st.recursive(st.booleans() | _schemas(st.booleans()), _schemas, max_leaves=6)


@settings(suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, definition=SCHEMAS, seed=st.integers(0, 1000))
def test_whatever_is_generated_is_valid(schema: Any, definition: Any, seed: int) -> None:
    if isinstance(schema, dict):
        schema = {**schema, "$defs": {"x": definition}}
    try:
        grammar = grammar_of(JsonSchema(schema, "schema"), "schema")
    except ConstraintError:
        assume(condition=False)
    text = walk(grammar, seed, patience=30, limit=400)
    if text is not None:
        Draft202012Validator(schema).validate(json.loads(text))
