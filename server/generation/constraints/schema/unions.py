"""Whether no value fits two schemas at once, so that `oneOf` of them is `anyOf`.

Reads schemas as `reader` writes them. It says yes only when that is certain.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from server.generation.constraints.schema.values import canonical, type_of

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
MAX_MEMBERS = 200
_LEVELS = 2
"""Properties of properties may tell objects apart, but no deeper ones."""

Schema = Mapping[str, Any] | bool
Definitions = Mapping[str, Schema]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What all values that fit a schema have in common."""

    types: frozenset[str] = TYPES
    values: frozenset[str] | None = None
    """All that there are, in canonical form; None if they are not named."""
    members: Mapping[str, "_Shape"] = field(default_factory=dict)
    """Of properties, if there is one."""
    required: frozenset[str] = frozenset()
    closed: bool = False
    """An object has no other properties than the named ones."""


class Unions:
    """Answers for the schemas of one document. None of them may be applied to the same value as itself."""

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions
        self._known: dict[tuple[int, int], _Shape] = {}

    def are_disjoint(self, schemas: list[Schema]) -> bool:
        """No value fits two of them."""
        if len(schemas) > MAX_MEMBERS:
            return False
        shapes = [self._shape(schema, _LEVELS) for schema in schemas]
        return all(_differ(first, second) for first, second in combinations(shapes, 2))

    def _shape(self, schema: Schema, levels: int) -> _Shape:
        if isinstance(schema, bool):
            return _Shape() if schema else _Shape(types=frozenset())
        key = id(schema), levels
        if key not in self._known:
            self._known[key] = self._combined(schema, levels)
        return self._known[key]

    def _combined(self, schema: Mapping[str, Any], levels: int) -> _Shape:
        shape = self._own(schema, levels)
        parts = list(schema.get("allOf", ()))
        if "$ref" in schema:
            parts.append(self._definitions[schema["$ref"]])
        for part in parts:
            shape = _both(shape, self._shape(part, levels))
        if "anyOf" in schema:
            shape = _both(shape, _any([self._shape(part, levels) for part in schema["anyOf"]]))
        return shape

    def _own(self, schema: Mapping[str, Any], levels: int) -> _Shape:
        """Without what other schemas add."""
        types, values = TYPES, None
        if "type" in schema:
            names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            types = frozenset("number" if name == "integer" else name for name in names)
        constants = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if constants is not None:
            constants = [value for value in constants if type_of(value) in types]
            values = frozenset(canonical(value) for value in constants)
            types = frozenset(type_of(value) for value in constants)
        members = schema.get("properties", {}) if levels else {}
        return _Shape(
            types,
            values,
            {name: self._shape(part, levels - 1) for name, part in members.items()},
            frozenset(schema.get("required", ())),
            schema.get("additionalProperties") is False and "patternProperties" not in schema and levels > 0,
        )


def _differ(first: _Shape, second: _Shape) -> bool:
    if first.values is not None and second.values is not None:
        return not first.values & second.values
    shared = first.types & second.types
    if shared != {"object"}:
        return not shared
    return any(_tells_apart(name, first, second) for name in first.required) or any(
        _tells_apart(name, second, first) for name in second.required
    )


def _tells_apart(name: str, having: _Shape, other: _Shape) -> bool:
    """Every object of `having` has the property, and none of `other` has it so."""
    if name not in other.members:
        return other.closed
    return name in having.members and _differ(having.members[name], other.members[name])


def _both(first: _Shape, second: _Shape) -> _Shape:
    """Of what fits both schemas."""
    members = dict(first.members)
    for name, shape in second.members.items():
        members[name] = _both(members[name], shape) if name in members else shape
    return _Shape(
        first.types & second.types,
        _common(first.values, second.values),
        members,
        first.required | second.required,
        first.closed or second.closed,
    )


def _common(first: frozenset[str] | None, second: frozenset[str] | None) -> frozenset[str] | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _any(shapes: list[_Shape]) -> _Shape:
    """Of what fits one of the schemas: their types, and their values if all are named."""
    named = [shape.values for shape in shapes if shape.values is not None]
    values = frozenset[str]().union(*named) if len(named) == len(shapes) else None
    return _Shape(types=frozenset[str]().union(*(shape.types for shape in shapes)), values=values)
