"""Limits on the work that a schema needs once references are followed and alternatives multiplied out.

Reads schemas as `json_schema` writes them. A schema of a hundred bytes can mean more than any machine can compile, or
have no finite value. Both are found here, in time proportional to the schema's size.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from server.generation.constraints.fragment import ConstraintError
from server.generation.constraints.values import MAX_MULTIPLE, multiple_size

Schema = Mapping[str, Any] | bool
Definitions = Mapping[str, Schema]

MAX_OPTIONAL = 400
"""Optional properties of one object: each can be the next one, and a parser row holds 2,000 items."""
MAX_ALTERNATIVES = 2_000
"""Alternatives of one value that are multiplied with something else, as by `allOf` of several `anyOf`."""
MAX_APPLIED = 1_000
"""Schemas that apply to the same value."""
MAX_PATTERNS_TOGETHER = 10
"""Patterns for the same text: from 18 on, each one doubles the time and memory of compiling."""
_MAX_CHAIN = 150
_MAX_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class _Size:
    """The size of all schemas that apply to one value."""

    alternatives: int = 1
    combined: int = 1
    """Alternatives, of this schema or one that it refers to, that are multiplied with something else."""
    applied: int = 1
    optional: int = 0
    patterns: int = 0
    multiple: int = 1


class SchemaLimits:
    """Checks the schemas of one document against the limits."""

    def __init__(self, definitions: Definitions, path_of: Callable[[Schema], str]) -> None:
        self._definitions = definitions
        self._path_of = path_of
        self._sizes: dict[int, _Size] = {}
        self._open: set[int] = set()

    def check(self) -> None:
        """Raises ConstraintError for the first schema that exceeds a limit or has no finite value."""
        multiples = 0
        for schema in self._definitions.values():
            for part in _all_parts(schema):
                self._size(part)
                if isinstance(part, Mapping) and "multipleOf" in part:
                    multiples += multiple_size(part["multipleOf"])
                    if multiples > MAX_MULTIPLE:
                        raise ConstraintError(self._path_of(part), "The sum of all 'multipleOf' is too large.")
        self._check_ends()

    def _size(self, schema: Schema) -> _Size:
        if isinstance(schema, bool):
            return _Size()
        if id(schema) in self._open:
            raise ConstraintError(self._path_of(schema), "Refers to itself without anything in between.")
        if len(self._open) > _MAX_CHAIN:
            raise ConstraintError(self._path_of(schema), f"More than {_MAX_CHAIN} references in a row.")
        if id(schema) not in self._sizes:
            self._open.add(id(schema))
            size = self._sizes[id(schema)] = self._measure(schema)
            self._open.remove(id(schema))
            self._check_size(size, self._path_of(schema))
        return self._sizes[id(schema)]

    def _measure(self, schema: Mapping[str, Any]) -> _Size:
        together = [self._size(part) for part in schema.get("allOf", ())]
        if "$ref" in schema:
            together.append(self._size(self._definitions[schema["$ref"]]))
        one_of = [self._size(part) for part in schema.get("anyOf", ())]
        multiple = multiple_size(schema["multipleOf"]) if "multipleOf" in schema else 1
        if not together and not one_of:
            return _Size(optional=_optional(schema), patterns=int("pattern" in schema), multiple=multiple)
        alternatives = max(1, sum(size.alternatives for size in one_of))
        alternatives *= prod(size.alternatives for size in together)
        is_combined = len(schema) > 1 or len(together) > 1
        parts = together + one_of

        def total(number: Callable[[_Size], int]) -> int:
            """The sum over schemas that all apply, plus the largest alternative."""
            return sum(map(number, together)) + max(map(number, one_of), default=0)

        return _Size(
            alternatives=alternatives,
            combined=max([alternatives if is_combined else 1, *(size.combined for size in parts)]),
            applied=1 + total(lambda size: size.applied),
            optional=_optional(schema) + total(lambda size: size.optional),
            patterns=("pattern" in schema) + total(lambda size: size.patterns),
            multiple=multiple * prod(size.multiple for size in parts),
        )

    def _check_size(self, size: _Size, path: str) -> None:
        limits = (
            (size.combined, MAX_ALTERNATIVES, "combinations of alternatives"),
            (size.applied, MAX_APPLIED, "schemas for the same value"),
            (size.optional, MAX_OPTIONAL, "optional properties in one object"),
            (size.patterns, MAX_PATTERNS_TOGETHER, "patterns for the same value"),
        )
        for number, limit, what in limits:
            if number > limit:
                raise ConstraintError(path, f"More than {limit} {what} are not supported.")
        if size.multiple > MAX_MULTIPLE:
            raise ConstraintError(path, "The product of all 'multipleOf' for the same value is too large.")

    def _check_ends(self) -> None:
        """Find the definitions with a finite value, round by round, and refuse the others."""
        ending: set[str] = set()
        for _ in range(_MAX_ROUNDS):
            before = len(ending)
            for name, schema in reversed(list(self._definitions.items())):
                if name not in ending and _ends(schema, ending):
                    ending.add(name)
            if len(ending) in {before, len(self._definitions)}:
                break
        for name, schema in self._definitions.items():
            if name not in ending:
                raise ConstraintError(self._path_of(schema), "No finite value fits.")


def _optional(schema: Mapping[str, Any]) -> int:
    required = set(schema.get("required", ()))
    return sum(name not in required for name in schema.get("properties", {}))


def _all_parts(schema: Schema) -> Iterator[Schema]:
    """The schema and all schemas in it, without following references."""
    waiting = [schema]
    while waiting:
        here = waiting.pop()
        yield here
        if isinstance(here, Mapping):
            for keyword in ("properties", "patternProperties"):
                waiting += here.get(keyword, {}).values()
            for keyword in ("anyOf", "allOf", "prefixItems"):
                waiting += here.get(keyword, ())
            waiting += [here[keyword] for keyword in ("items", "additionalProperties") if keyword in here]


def _ends(schema: Schema, ending: set[str]) -> bool:
    """Whether a finite value may fit, given the definitions in `ending` that have one."""
    if isinstance(schema, bool) or "enum" in schema or "const" in schema:
        return True
    if "$ref" in schema and schema["$ref"] not in ending:
        return False
    if not all(_ends(part, ending) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_ends(part, ending) for part in schema["anyOf"]):
        return False
    types = schema.get("type", "null")
    if types == "object":
        properties = schema.get("properties", {})
        return all(_ends(properties.get(name, True), ending) for name in schema.get("required", ()))
    if types == "array":
        first = schema.get("prefixItems", [])
        needed = schema.get("minItems", 0)
        return all(_ends(item, ending) for item in first[:needed]) and (
            needed <= len(first) or _ends(schema.get("items", True), ending)
        )
    return True
