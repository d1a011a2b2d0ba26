"""A client's schema, read before anything is compiled and written again with what llguidance enforces.

What comes out is JSON schema 2020-12 with few keywords: no annotations, references to definitions of their own only,
numbers and patterns that mean to llguidance what the client's mean. As JSON schema says, unknown keywords constrain
nothing. llguidance would refuse some that it does know without saying where, and take minutes for a few bytes: that
is found here, in a time that grows with the schema's bytes only.

Two things are stricter than the schema: bounds beyond 2**53 are moved inwards to a double, and declared properties
come in the schema's order. And two are not enforced: that undeclared properties have different names, and when there
are leap seconds.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.generation.constraints.check import check_grammar
from server.generation.constraints.errors import ConstraintError, check_text, under
from server.generation.constraints.fragment import literal
from server.generation.constraints.patterns import MAX_EXPANDED, read_pattern
from server.generation.constraints.schema.limits import Limits
from server.generation.constraints.schema.numbers import read_bound, read_count, read_multiple
from server.generation.constraints.schema.references import References, is_document
from server.generation.constraints.schema.unions import TYPES, Schema, Unions
from server.generation.constraints.schema.values import check_value
from server.generation.constraints.schema.verdicts import DEPENDENTS, FORMATS, LEAP_DAYS, refusal
from server.generation.notices import Notice

MAX_CHARACTERS = 1_000_000
MAX_NODES = 20_000
"""Schemas and constants together."""
MAX_DEPTH = 60
"""Of schemas in schemas: two levels of JSON each, of which llguidance reads 125."""
MAX_ENUM = 10_000
MAX_PATTERNS = 10 * MAX_EXPANDED
_MAX_NOTICES = 100
_TYPES = (*sorted(TYPES), "integer")


@dataclass(frozen=True, slots=True)
class EnforcedSchema:
    """What of a schema will be enforced."""

    schema: Mapping[str, Any]
    """Empty if anything fits."""
    notices: tuple[Notice, ...] = ()
    """What will not be; always empty if the schema was to be read strictly."""


def read_schema(schema: Any, path: str, *, strict: bool = True) -> EnforcedSchema:
    """The schema as llguidance takes it. Its size and the time that compiling it takes are bounded.

    Raises ConstraintError, with the path inside the schema below `path`, if something in it cannot be enforced exactly.
    Unless it is `strict`: then that is left out, so that more is allowed but nothing less, and told in the notices.
    """
    return _Reader(schema, path, strict=strict).read()


@dataclass(slots=True)
class _Node:
    """A schema that is being read."""

    given: Mapping[str, Any]
    path: str
    depth: int
    written: dict[str, Any] = field(default_factory=dict)

    def at(self, keyword: str) -> str:
        """The path of a keyword."""
        return under(self.path, keyword)


class _Reader:
    """Reads one document."""

    def __init__(self, schema: Any, path: str, *, strict: bool) -> None:
        self._root = schema
        self._path = path
        self._strict = strict
        self._references = References(schema, path)
        self._names = {id(schema): "#"}
        """The definitions that will be written, by what they are read from."""
        self._waiting: list[tuple[Any, str]] = []
        self._paths: dict[int, str] = {}
        self._unions: list[tuple[list[Schema], str]] = []
        self._notices: list[Notice] = []
        self._embedded = 0
        self._nodes = self._characters = self._patterns = 0

    def read(self) -> EnforcedSchema:
        definitions: dict[str, Schema] = {"#": self._schema(self._root, self._path, 0)}
        while self._waiting:
            schema, path = self._waiting.pop()
            definitions[self._names[id(schema)]] = self._schema(schema, path, 0)
        try:
            Limits(definitions, self._path_of).check()
            self._check_unions(definitions)
        except ConstraintError as error:
            self._leave_out(error)
            return EnforcedSchema({}, tuple(self._notices))
        root = definitions.pop("#")
        if root is False:
            self._leave_out(ConstraintError(self._path, "No value fits."))
        if isinstance(root, bool):
            return EnforcedSchema({}, tuple(self._notices))
        if definitions:
            named = {name.removeprefix("#/$defs/"): schema for name, schema in definitions.items()}
            root = {**root, "$defs": named}
        return EnforcedSchema(root, tuple(self._notices))

    def _path_of(self, schema: Schema) -> str:
        return self._paths.get(id(schema), self._path)

    def _check_unions(self, definitions: Mapping[str, Schema]) -> None:
        unions = Unions(definitions)
        for members, path in self._unions:
            if not unions.are_disjoint(members):
                reason = "A value might fit two of these. Use 'anyOf', or a required property with a constant in each."
                error = ConstraintError(path, reason)
                self._leave_out(error)

    def _leave_out(self, error: ConstraintError) -> None:
        if self._strict:
            raise error
        if len(self._notices) < _MAX_NOTICES:
            self._notices.append(Notice(error.path, error.reason))

    def _spend(self, path: str, *, nodes: int = 1, characters: int = 0) -> None:
        self._nodes += nodes
        self._characters += characters
        if self._nodes > MAX_NODES or self._characters > MAX_CHARACTERS:
            raise ConstraintError(path, "The schema is too large.")

    def _schema(self, schema: Any, path: str, depth: int) -> Schema:
        """A schema, or everything if what it is cannot be said."""
        try:
            self._spend(path)
            if isinstance(schema, bool):
                return schema
            if not isinstance(schema, dict):
                raise ConstraintError(path, "Expected a schema: an object or a boolean.")
            if depth > MAX_DEPTH:
                raise ConstraintError(path, f"Nested more than {MAX_DEPTH} deep.")
        except ConstraintError as error:
            self._leave_out(error)
            return True
        node = _Node(schema, path, depth)
        self._paths[id(node.written)] = path
        is_embedded = is_document(schema) and schema is not self._root
        self._embedded += is_embedded
        self._keywords(node)
        self._embedded -= is_embedded
        return node.written

    def _keywords(self, node: _Node) -> None:
        without: set[str] = set()
        for keyword in node.given:
            try:
                self._keyword(node, keyword)
            except ConstraintError as error:
                self._leave_out(error)
                without.update(DEPENDENTS.get(keyword, ()))
        for keyword in without:
            node.written.pop(keyword, None)

    def _keyword(self, node: _Node, keyword: str) -> None:
        reason = refusal(node.given, keyword)
        if reason is not None:
            raise ConstraintError(node.at(keyword), reason)
        reader = _READERS.get(keyword)
        if reader is not None:
            reader(self, node, keyword)

    def _below(self, node: _Node, value: Any, path: str) -> Schema:
        return self._schema(value, path, node.depth + 1)

    def _type(self, node: _Node, keyword: str) -> None:
        value = node.given[keyword]
        names = value if isinstance(value, list) else [value]
        for name in names:
            if name not in _TYPES:
                raise ConstraintError(node.at(keyword), f"Expected one of {', '.join(_TYPES)}.")
        if not names:
            raise ConstraintError(node.at(keyword), "No type fits.")
        node.written[keyword] = value if isinstance(value, str) else list(dict.fromkeys(names))

    def _enum(self, node: _Node, keyword: str) -> None:
        values = self._list(node, keyword)
        if len(values) > MAX_ENUM:
            raise ConstraintError(node.at(keyword), f"More than {MAX_ENUM} values are not supported.")
        for index, value in enumerate(values):
            self._constant(value, under(node.at(keyword), index))
        node.written[keyword] = values

    def _const(self, node: _Node, keyword: str) -> None:
        self._constant(node.given[keyword], node.at(keyword))
        node.written[keyword] = node.given[keyword]

    def _constant(self, value: Any, path: str) -> None:
        nodes = check_value(value, path, MAX_DEPTH)
        self._spend(path, nodes=nodes, characters=len(literal(value)) if isinstance(value, str) else 0)

    def _properties(self, node: _Node, keyword: str) -> None:
        written = {}
        for name, schema in self._object(node, keyword).items():
            path = under(node.at(keyword), name)
            check_text(name, path)
            self._spend(path, characters=len(name))
            written[name] = self._below(node, schema, path)
        node.written[keyword] = written

    def _pattern_properties(self, node: _Node, keyword: str) -> None:
        written = {}
        for pattern, schema in self._object(node, keyword).items():
            path = under(node.at(keyword), pattern)
            written[self._expression(pattern, path)] = self._below(node, schema, path)
        if len(written) > 1:
            everything = dict.fromkeys(written, True)
            check_grammar(f"start: %json {json.dumps({keyword: everything})}", node.at(keyword))
        node.written[keyword] = written

    def _unevaluated(self, node: _Node, keyword: str) -> None:
        """Without other schemas for the same object it means `additionalProperties`."""
        if node.given[keyword] is False and "additionalProperties" not in node.given:
            node.written["additionalProperties"] = False

    def _items(self, node: _Node, keyword: str) -> None:
        if isinstance(node.given[keyword], list):  # as it was before 2020
            node.written["prefixItems"] = self._several(node, keyword)
        else:
            self._nested(node, keyword)

    def _additional_items(self, node: _Node, keyword: str) -> None:
        if isinstance(node.given.get("items"), list):
            node.written["items"] = self._below(node, node.given[keyword], node.at(keyword))

    def _nested(self, node: _Node, keyword: str) -> None:
        node.written[keyword] = self._below(node, node.given[keyword], node.at(keyword))

    def _prefix_items(self, node: _Node, keyword: str) -> None:
        node.written[keyword] = self._several(node, keyword)

    def _several(self, node: _Node, keyword: str) -> list[Schema]:
        values = self._list(node, keyword)
        return [self._below(node, value, under(node.at(keyword), index)) for index, value in enumerate(values)]

    def _all_of(self, node: _Node, keyword: str) -> None:
        node.written.setdefault(keyword, []).extend(self._several(node, keyword))

    def _any_of(self, node: _Node, keyword: str) -> None:
        self._alternatives(node, self._several(node, keyword))

    def _one_of(self, node: _Node, keyword: str) -> None:
        members = self._several(node, keyword)
        self._unions.append((members, node.at(keyword)))
        self._alternatives(node, members)

    def _alternatives(self, node: _Node, members: list[Schema]) -> None:
        """Written as `anyOf`, of which a schema has one: `oneOf` beside it becomes a part of `allOf`."""
        if "anyOf" in node.written:
            node.written.setdefault("allOf", []).append({"anyOf": members})
        else:
            node.written["anyOf"] = members

    def _required(self, node: _Node, keyword: str) -> None:
        names = node.given[keyword]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConstraintError(node.at(keyword), "Expected a list of names.")
        for name in names:
            check_text(name, node.at(keyword))
            self._spend(node.at(keyword), characters=len(name))
        node.written[keyword] = list(dict.fromkeys(names))

    def _count(self, node: _Node, keyword: str) -> None:
        count = read_count(node.given[keyword], node.at(keyword), is_minimum=keyword.startswith("min"))
        if count is not None:
            node.written[keyword] = count

    def _bound(self, node: _Node, keyword: str) -> None:
        value = node.given[keyword]
        is_minimum = keyword.lower().endswith("minimum")
        exclusive = "exclusiveMinimum" if is_minimum else "exclusiveMaximum"
        if keyword == exclusive and isinstance(value, bool):  # as it was before 2019: of the other keyword
            return
        is_exclusive = keyword == exclusive or node.given.get(exclusive) is True
        for name, number in read_bound(value, node.at(keyword), is_minimum=is_minimum, exclusive=is_exclusive).items():
            other = node.written.get(name, number)
            node.written[name] = max(number, other) if is_minimum else min(number, other)

    def _multiple_of(self, node: _Node, keyword: str) -> None:
        node.written[keyword] = read_multiple(node.given[keyword], node.at(keyword))

    def _pattern(self, node: _Node, keyword: str) -> None:
        node.written[keyword] = self._expression(node.given[keyword], node.at(keyword))

    def _expression(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise ConstraintError(path, "Expected a string.")
        self._spend(path, characters=len(value))
        pattern = read_pattern(value, path)
        self._patterns += pattern.size
        if self._patterns > MAX_PATTERNS:
            raise ConstraintError(path, f"All patterns together may have {MAX_PATTERNS} characters.")
        return pattern.rust

    def _format(self, node: _Node, keyword: str) -> None:
        types = node.given.get("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            return  # formats are of strings: 'int32' and the like say nothing that a schema is bound to
        value = node.given[keyword]
        if value not in FORMATS:
            raise ConstraintError(node.at(keyword), f"Only these formats are enforced: {', '.join(sorted(FORMATS))}.")
        node.written[keyword] = value
        if value in {"date", "date-time"}:
            node.written.setdefault("allOf", []).append({"pattern": LEAP_DAYS})

    def _ref(self, node: _Node, keyword: str) -> None:
        schema, path = self._references.resolve(node.given[keyword], node.at(keyword))
        if self._embedded:
            raise ConstraintError(node.at(keyword), "References in a part with an '$id' of its own are not supported.")
        if id(schema) not in self._names:
            self._names[id(schema)] = f"#/$defs/{len(self._names)}"
            self._waiting.append((schema, path))
        node.written[keyword] = self._names[id(schema)]

    def _list(self, node: _Node, keyword: str) -> list[Any]:
        value = node.given[keyword]
        if not isinstance(value, list) or not value:
            raise ConstraintError(node.at(keyword), "Expected a list that is not empty.")
        return value

    def _object(self, node: _Node, keyword: str) -> dict[str, Any]:
        value = node.given[keyword]
        if not isinstance(value, dict):
            raise ConstraintError(node.at(keyword), "Expected an object.")
        return value


_READERS: Mapping[str, Callable[[_Reader, _Node, str], None]] = {
    "type": _Reader._type,
    "enum": _Reader._enum,
    "const": _Reader._const,
    "properties": _Reader._properties,
    "patternProperties": _Reader._pattern_properties,
    "additionalProperties": _Reader._nested,
    "unevaluatedProperties": _Reader._unevaluated,
    "required": _Reader._required,
    "items": _Reader._items,
    "additionalItems": _Reader._additional_items,
    "prefixItems": _Reader._prefix_items,
    "allOf": _Reader._all_of,
    "anyOf": _Reader._any_of,
    "oneOf": _Reader._one_of,
    "minimum": _Reader._bound,
    "maximum": _Reader._bound,
    "exclusiveMinimum": _Reader._bound,
    "exclusiveMaximum": _Reader._bound,
    "multipleOf": _Reader._multiple_of,
    "pattern": _Reader._pattern,
    "format": _Reader._format,
    "$ref": _Reader._ref,
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), _Reader._count
    ),
}
