"""JSON as an answer: any object, or JSON that fits a schema.

A client's schema is read before anything is compiled, and rewritten in JSON schema 2020-12 with few keywords. It has no
annotations, only references to its own definitions, and numbers and patterns that mean the same to llguidance. Unknown
keywords constrain nothing, as JSON schema says. llguidance reports what of the rest it cannot enforce, but not where,
so doubtful parts are compiled separately.

Three things are stricter than the schema: objects have no properties that it does not name, unless it says so
(`closing`); bounds beyond 2**53 move inwards to a double; and declared properties come in the schema's order. Two are
not enforced: that properties of open objects have different names, and the dates of leap seconds.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from server.generation.constraints.check import compile_error, grammar_error
from server.generation.constraints.closing import CLOSED, NO_NAMES, Names, ObjectCloser, names_said, with_listed_names
from server.generation.constraints.fragment import ConstraintError, Fragment, check_text, literal, under, whole
from server.generation.constraints.limits import Definitions, Schema, SchemaLimits
from server.generation.constraints.references import References, is_document
from server.generation.constraints.texts import MAX_EXPANDED, read_pattern, regex_size
from server.generation.constraints.values import check_constant, read_bound, read_count, read_multiple
from server.generation.notices import Notice

MAX_CHARACTERS = 1_000_000
MAX_NODES = 20_000
"""Schemas and constants, counted together."""
MAX_DEPTH = 60
"""Nested schemas. Each is two levels of JSON, and llguidance reads 125 levels."""
MAX_ENUM = 10_000
MAX_PATTERNS = 10 * MAX_EXPANDED
_MAX_NOTICES = 100
_MAX_MEMBERS = 200
"""Schemas of one `oneOf`. Each is compared with each."""
_MAX_OUTLINED = 5_000
"""Schemas in the outlines of all `oneOf` members together."""
_MAX_TRIED = 3 * MAX_CHARACTERS
_TRIAL = 15_000
"""Cost of a trial in addition to its characters: even an empty one takes a millisecond."""
_KEPT = 256
"""Cached schemas, because clients send the same ones again and again."""

_ESCAPES = 'nrbtf\\"'
"""No `\\uXXXX`: with it, a declared name could occur again with a value of any type."""
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
_LEAP_YEARS = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00"
_LEAP_DAYS = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|(?:{_LEAP_YEARS})-02-29)"
"""A pattern for valid days. llguidance itself allows 29 February in every year."""
_ANYTHING: tuple[Any, ...] = (True, {})
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "contains": (),
    "propertyNames": (*_ANYTHING, {"type": "string"}),
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedItems": _ANYTHING,
    "$dynamicRef": (),
    "$recursiveRef": (),
}
"""Keywords that cannot be enforced, with the values that have no effect."""
_APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"})
_DEPENDENTS: Mapping[str, tuple[str, ...]] = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items",),
    "items": ("items",),
}
"""Keywords whose omission changes what others mean, so that those must be omitted, too."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_PROPERTIES = frozenset(
    {"minProperties", "maxProperties", "required", "additionalProperties", "properties", "patternProperties"}
)
_NAMING = frozenset({"properties", "required", "$ref", "allOf", "anyOf", "oneOf"})
"""Keywords without which the names of an object's properties are not known."""
_NOT_DISJOINT = "A value might fit two of these. Use 'anyOf', or a required property with a constant string in each."


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """How JSON is written."""

    whitespace: str | None
    """The whitespace that is allowed between JSON tokens: an expression in llguidance's dialect, used at most once at
    each place; None for no whitespace."""
    is_open: bool | None = None
    """Whether an object may have properties that its schema does not name, where the schema does not say so. None: it
    may not, and that is reported."""


BOUNDED = JsonStyle(r"[ \t]{1,8}|\r?\n[ \t]{0,32}")
"""A few blanks, or a new line with an indentation. Bounded, because models might otherwise write whitespace forever."""


def read_whitespace(pattern: str, path: str) -> str | None:
    """A JsonStyle's whitespace, from a client's expression. Raises ConstraintError if it cannot be enforced."""
    rust = read_pattern(pattern, path)
    error = compile_error(_start({"pattern": rust}))
    if error is not None:
        raise ConstraintError(path, error)
    return rust or None


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that fits a schema."""

    schema: Any
    path: str
    style: JsonStyle = BOUNDED
    is_strict: bool = True
    """Whether a schema that cannot be enforced completely is refused. Otherwise notices name the other parts."""

    def fragment(self, name: str) -> Fragment:
        """A grammar without rules. Raises ConstraintError for a strict schema that cannot be enforced."""
        return schema_fragment(json.dumps(self.schema), self.path, self.style, is_strict=self.is_strict)


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""

    style: JsonStyle = BOUNDED

    def fragment(self, name: str) -> Fragment:
        """A grammar without rules. Never raises."""
        return json_fragment({"type": "object"}, self.style)


@lru_cache(_KEPT)
def schema_fragment(schema: str, path: str, style: JsonStyle, *, is_strict: bool) -> Fragment:
    """JSON that fits this schema, given as text; if it is not strict, its enforceable part. Raises ConstraintError."""
    read = read_schema(json.loads(schema), path, strict=is_strict, is_open=style.is_open)
    fragment = replace(json_fragment(read.schema, style), notices=read.notices)
    error = None if is_strict else grammar_error(whole(fragment))
    if error is None:
        return fragment
    return replace(json_fragment({}, style), notices=(*read.notices, Notice(path, error)))


def json_fragment(schema: Mapping[str, Any], style: JsonStyle) -> Fragment:
    """JSON that fits a schema that `read_schema` has written, without whitespace around it."""
    options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES}
    if style.whitespace is None:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = style.whitespace
    return Fragment("%json " + json.dumps({"x-guidance": options, **schema}))


@dataclass(frozen=True, slots=True)
class EnforcedSchema:
    """The enforced part of a schema."""

    schema: Mapping[str, Any]
    """Empty if any value fits."""
    notices: tuple[Notice, ...] = ()
    """Notices of the parts that are not enforced, and of objects that are closed."""


def read_schema(schema: Any, path: str, *, strict: bool = True, is_open: bool | None = None) -> EnforcedSchema:
    """The schema as llguidance accepts it, with bounded size and compile time.

    If it is `strict`, raises ConstraintError, with a path below `path`, for a part that cannot be enforced exactly.
    Otherwise such a part is omitted with a notice, so that more is allowed but never less. `is_open` is JsonStyle's.
    """
    return _SchemaReader(schema, path, strict=strict, is_open=is_open).read()


@dataclass(slots=True)
class _Node:
    """A schema that is being read."""

    given: Mapping[str, Any]
    path: str
    depth: int
    written: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A part of a schema that llguidance may refuse."""

    keyword: str
    path: str
    written: dict[str, Any]
    """The schema that contains the keyword."""

    def schema(self) -> Mapping[str, Any]:
        """The part to compile, without nested schemas unless they matter."""
        if self.keyword in {"oneOf", "pattern"}:
            return {self.keyword: self.written[self.keyword]}
        names = ["patternProperties"] if self.keyword == "patternProperties" else _OF_PROPERTIES
        return {name: _hollow(name, self.written[name]) for name in names if name in self.written}


class _SchemaReader:
    """Reads the schema of one document."""

    def __init__(self, schema: Any, path: str, *, strict: bool, is_open: bool | None) -> None:
        self._root = schema
        self._path = path
        self._strict = strict
        self._is_open = is_open
        self._references = References(schema, path)
        self._names = {id(schema): "#"}
        """Names of the definitions to write, by the ids of the schemas that they are read from."""
        self._waiting: list[tuple[Any, str]] = []
        self._paths: dict[int, str] = {}
        self._said: dict[int, tuple[Schema, Names]] = {}
        """Names of properties that written schemas lack, by the ids of these schemas."""
        self._trials: list[_Trial] = []
        self._unions: list[_Trial] = []
        self._notices: list[Notice] = []
        self._embedded = 0
        self._nodes = self._characters = self._patterns = self._tried = 0

    def read(self) -> EnforcedSchema:
        definitions: dict[str, Schema] = {"#": self._schema(self._root, self._path, 0)}
        while self._waiting:
            schema, path = self._waiting.pop()
            definitions[self._names[id(schema)]] = self._schema(schema, path, 0)
        try:
            SchemaLimits(definitions, self._path_of).check()
            self._try(definitions)
            definitions = dict(self._close(definitions))
        except ConstraintError as error:
            self._leave_out(error)
            return EnforcedSchema({}, tuple(self._notices))
        root = definitions["#"]
        if root is False:
            self._leave_out(ConstraintError(self._path, "No value fits."))
        if isinstance(root, bool):
            return EnforcedSchema({}, tuple(self._notices))
        named = {name.removeprefix("#/$defs/"): schema for name, schema in definitions.items() if name != "#"}
        return EnforcedSchema({**root, **({"$defs": named} if named else {})}, tuple(self._notices))

    def _close(self, definitions: Definitions) -> Definitions:
        """Close the objects, unless the request opens them, and report it once."""

        def said(schema: Schema) -> Names:
            return self._said[id(schema)][1] if id(schema) in self._said else NO_NAMES

        closer = ObjectCloser(definitions, self._path_of, said, keeps_open=bool(self._is_open))
        closed = closer.close()
        if closer.has_closed and self._is_open is None:
            self._notices.append(Notice(self._path, CLOSED))
        return closed

    def _path_of(self, schema: Schema) -> str:
        return self._paths.get(id(schema), self._path)

    def _try(self, definitions: Definitions) -> None:
        """Omit the parts that llguidance refuses."""
        self._nodes, self._characters = MAX_NODES - _MAX_OUTLINED, 0
        unions = [union for union in self._unions if self._is_outlined(union, definitions)]
        for trial, reason in self._refused([*self._trials, *unions]):
            self._leave_out(ConstraintError(trial.path, _NOT_DISJOINT if trial.keyword == "oneOf" else reason))
            for keyword in (trial.keyword, *_DEPENDENTS.get(trial.keyword, ())):
                trial.written.pop(keyword, None)

    def _refused(self, trials: Sequence[_Trial]) -> Iterator[tuple[_Trial, str]]:
        """The parts that do not compile, found by bisection, and why."""
        if not trials:
            return
        reason: str | None = "Not checked: the schema has too many parts that cannot be enforced."
        if self._tried < _MAX_TRIED:
            grammar = _start({"prefixItems": [trial.schema() for trial in trials]})
            self._tried += len(grammar) + _TRIAL
            reason = compile_error(grammar)
        if reason is None:
            return
        if len(trials) == 1:
            yield trials[0], reason
            return
        for half in (trials[: len(trials) // 2], trials[len(trials) // 2 :]):
            yield from self._refused(half)

    def _is_outlined(self, union: _Trial, definitions: Definitions) -> bool:
        """Replace the members of `oneOf` by outlines. Returns False, and omits the union, if that takes too much."""
        try:
            if len(union.written["oneOf"]) > _MAX_MEMBERS:
                raise ConstraintError(union.path, f"More than {_MAX_MEMBERS} schemas are not supported.")
            members = [self._outline(one, definitions, union.path) for one in union.written["oneOf"]]
        except ConstraintError as error:
            self._leave_out(error)
            return False
        union.written["oneOf"] = _numbers_together(members)
        return True

    def _outline(self, schema: Schema, definitions: Definitions, path: str, *, is_property: bool = False) -> Schema:
        """The parts of a schema by which llguidance distinguishes it from others, without references.

        Every value that fits the schema fits the outline.
        """
        self._spend(path)
        if isinstance(schema, bool):
            return schema
        if schema.keys() == {"$ref"}:
            return self._outline(definitions[schema["$ref"]], definitions, path, is_property=is_property)
        kept = {keyword: schema[keyword] for keyword in ("type", "enum", "const") if keyword in schema}
        names = [*schema.get("required", ()), *schema.get("properties", ())]
        self._spend(path, nodes=len(schema.get("enum", ())), characters=len(json.dumps([kept, names])))
        if not is_property:
            kept["required"] = schema.get("required", [])
            kept["properties"] = {
                name: self._outline(one, definitions, path, is_property=True)
                for name, one in schema.get("properties", {}).items()
            }
            if schema.get("additionalProperties") is False and "patternProperties" not in schema:
                kept["additionalProperties"] = False
        together = [*schema.get("allOf", ()), *([definitions[schema["$ref"]]] if "$ref" in schema else [])]
        for keyword, parts in (("allOf", together), ("anyOf", schema.get("anyOf", ()))):
            if parts:
                kept[keyword] = [self._outline(one, definitions, path, is_property=is_property) for one in parts]
        return kept

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
        """A schema; one that any value fits if the given one is omitted."""
        try:
            self._spend(path)
            if isinstance(schema, bool):
                return schema
            if not isinstance(schema, dict):
                raise ConstraintError(path, "Expected a schema: an object or a boolean.")
            if depth > MAX_DEPTH:
                raise ConstraintError(path, f"Nesting deeper than {MAX_DEPTH} levels is not supported.")
        except ConstraintError as error:
            self._leave_out(error)
            return True
        node = _Node(schema, path, depth)
        self._paths[id(node.written)] = path
        is_embedded = is_document(schema) and schema is not self._root
        self._embedded += is_embedded
        without: set[str] = set()
        for keyword, value in self._with_names(schema, path).items():
            try:
                self._keyword(node, keyword, value, under(path, keyword))
            except ConstraintError as error:
                self._leave_out(error)
                without.update((keyword, *_DEPENDENTS.get(keyword, ())))
        for keyword in without:
            node.written.pop(keyword, None)
        self._embedded -= is_embedded
        said = self._names_said(node, is_complete=_NAMING.isdisjoint(without))
        if not said.is_empty:
            self._said[id(node.written)] = node.written, said
        return node.written

    def _with_names(self, schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        """The schema with the names in `propertyNames` as properties, where that is possible."""
        at = under(path, "propertyNames")

        def resolve(reference: object) -> Any:
            if self._embedded:
                raise ConstraintError(at, "References in a part with its own '$id' are not supported.")
            self._spend(at, characters=len(reference) if isinstance(reference, str) else 0)
            return self._references.resolve(reference, at)[0]

        try:
            return with_listed_names(schema, resolve)
        except ConstraintError:
            return schema

    def _names_said(self, node: _Node, *, is_complete: bool) -> Names:
        """The names in keywords that are not enforced. An object whose names are not all known stays open."""
        try:
            found = names_said(
                node.given, lambda name: self._references.resolve(name, node.path)[0], lambda: self._spend(node.path)
            )
        except ConstraintError:
            is_complete = False
        return found if is_complete else Names(is_open=True)

    def _keyword(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        if keyword in _UNSUPPORTED and value not in _UNSUPPORTED[keyword]:
            raise ConstraintError(path, f"'{keyword}' is not supported.")
        if keyword in _READERS:
            _READERS[keyword](self, node, keyword, value, path)

    def _nested(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        node.written[keyword] = self._schema(value, path, node.depth + 1)

    def _several(self, node: _Node, keyword: str, value: Any, path: str) -> list[Schema]:
        schemas = _list(value, path)
        return [self._schema(one, under(path, index), node.depth + 1) for index, one in enumerate(schemas)]

    def _by_name(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        """Schemas of properties, by name or by name pattern."""
        if not isinstance(value, dict):
            raise ConstraintError(path, "Expected an object.")
        is_pattern = keyword == "patternProperties"
        written = {}
        for name, schema in value.items():
            at = under(path, name)
            key = self._expression(name, at) if is_pattern else self._text(name, at)
            written[key] = self._schema(schema, at, node.depth + 1)
            if is_pattern:
                self._trials.append(_Trial(keyword, at, {keyword: {key: True}}))
        node.written[keyword] = written
        if is_pattern:
            self._trials.append(_Trial(keyword, path, node.written))

    def _type(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        names = value if isinstance(value, list) else [value]
        for name in names:
            if name not in _TYPES:
                raise ConstraintError(path, f"Expected one of {', '.join(_TYPES)}.")
        if not names:
            raise ConstraintError(path, "The list of types is empty.")
        node.written[keyword] = value

    def _enum(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        values = _list(value, path)
        if len(values) > MAX_ENUM:
            raise ConstraintError(path, f"More than {MAX_ENUM} values are not supported.")
        for index, one in enumerate(values):
            self._constant(one, under(path, index))
        node.written[keyword] = values

    def _const(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        self._constant(value, path)
        node.written[keyword] = value

    def _constant(self, value: Any, path: str) -> None:
        nodes = check_constant(value, path, MAX_DEPTH)
        self._spend(path, nodes=nodes, characters=len(literal(value)) if isinstance(value, str) else 0)

    def _text(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise ConstraintError(path, "Expected a string.")
        check_text(value, path)
        self._spend(path, characters=len(value))
        return value

    def _expression(self, value: Any, path: str) -> str:
        rust = read_pattern(self._text(value, path), path)
        self._patterns += regex_size(rust)
        if self._patterns > MAX_PATTERNS:
            raise ConstraintError(path, f"All patterns together must not exceed {MAX_PATTERNS} characters.")
        return rust

    def _unevaluated(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        """`unevaluated...`: means `additionalProperties` unless other schemas apply to the same object."""
        if value is False and not _APPLICATORS & node.given.keys():
            node.written.setdefault("additionalProperties", False)
        elif value not in _ANYTHING:
            raise ConstraintError(path, f"'{keyword}' is not supported.")

    def _items(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        """One schema, or several as in drafts before 2020."""
        if isinstance(value, list):
            node.written["prefixItems"] = self._several(node, keyword, value, path)
        else:
            self._nested(node, keyword, value, path)

    def _additional_items(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        if isinstance(node.given.get("items"), list):
            self._nested(node, "items", value, path)

    def _prefix_items(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        node.written[keyword] = self._several(node, keyword, value, path)

    def _all_of(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        node.written.setdefault(keyword, []).extend(self._several(node, keyword, value, path))

    def _any_of(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        """`anyOf` or `oneOf`, written as `anyOf`. A schema has only one, so another one becomes a part of `allOf`."""
        members = self._several(node, keyword, value, path)
        if keyword == "oneOf":
            self._unions.append(_Trial(keyword, path, {keyword: members}))
        if "anyOf" in node.written:
            node.written.setdefault("allOf", []).append({"anyOf": members})
        else:
            node.written["anyOf"] = members

    def _required(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        if not isinstance(value, list):
            raise ConstraintError(path, "Expected a list of names.")
        node.written[keyword] = list(dict.fromkeys(self._text(name, path) for name in value))

    def _count(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        count = read_count(value, path, is_minimum=keyword.startswith("min"))
        if count is None:
            return
        node.written[keyword] = count
        if keyword.endswith("Properties"):
            self._trials.append(_Trial(keyword, path, node.written))

    def _bound(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        is_minimum = keyword.lower().endswith("minimum")
        exclusive = "exclusiveMinimum" if is_minimum else "exclusiveMaximum"
        if keyword == exclusive and isinstance(value, bool):  # a draft-4 flag on the other keyword
            return
        is_exclusive = keyword == exclusive or node.given.get(exclusive) is True
        bound, is_exclusive = read_bound(value, path, is_minimum=is_minimum, exclusive=is_exclusive)
        name = exclusive if is_exclusive else "minimum" if is_minimum else "maximum"
        other = node.written.get(name, bound)
        node.written[name] = max(bound, other) if is_minimum else min(bound, other)

    def _multiple_of(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        bounds = (node.given.get(name) for name in _BOUNDS)
        node.written[keyword] = read_multiple(
            value, path, [bound for bound in bounds if isinstance(bound, int | float)]
        )

    def _pattern(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        node.written[keyword] = self._expression(value, path)
        self._trials.append(_Trial(keyword, path, node.written))

    def _format(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        types = node.given.get("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            return  # formats apply to strings; 'int32' and similar ones constrain nothing
        if value not in _FORMATS:
            raise ConstraintError(path, f"Only these formats are enforced: {', '.join(_FORMATS)}.")
        node.written[keyword] = value
        if value in {"date", "date-time"}:
            node.written.setdefault("allOf", []).append({"pattern": _LEAP_DAYS})

    def _ref(self, node: _Node, keyword: str, value: Any, path: str) -> None:
        schema, at = self._references.resolve(value, path)
        if self._embedded:
            raise ConstraintError(path, "References in a part with its own '$id' are not supported.")
        if id(schema) not in self._names:
            self._names[id(schema)] = f"#/$defs/{len(self._names)}"
            self._waiting.append((schema, at))
        node.written[keyword] = self._names[id(schema)]


_READERS: Mapping[str, Callable[[_SchemaReader, _Node, str, Any, str], None]] = {
    "type": _SchemaReader._type,
    "enum": _SchemaReader._enum,
    "const": _SchemaReader._const,
    "properties": _SchemaReader._by_name,
    "patternProperties": _SchemaReader._by_name,
    "additionalProperties": _SchemaReader._nested,
    "unevaluatedProperties": _SchemaReader._unevaluated,
    "required": _SchemaReader._required,
    "items": _SchemaReader._items,
    "additionalItems": _SchemaReader._additional_items,
    "prefixItems": _SchemaReader._prefix_items,
    "allOf": _SchemaReader._all_of,
    "anyOf": _SchemaReader._any_of,
    "oneOf": _SchemaReader._any_of,
    **dict.fromkeys(_BOUNDS, _SchemaReader._bound),
    "multipleOf": _SchemaReader._multiple_of,
    "pattern": _SchemaReader._pattern,
    "format": _SchemaReader._format,
    "$ref": _SchemaReader._ref,
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), _SchemaReader._count
    ),
}


def _start(schema: Mapping[str, Any]) -> str:
    return f"start: %json {json.dumps(schema)}"


def _hollow(keyword: str, value: Any) -> Any:
    """The value of a keyword for properties, without their schemas."""
    if keyword == "additionalProperties":
        return value is not False
    return dict.fromkeys(value, True) if isinstance(value, dict) else value


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ConstraintError(path, "Expected a non-empty list.")
    return value


def _numbers_together(members: Sequence[Schema]) -> Sequence[Schema]:
    """Members of `oneOf`, with one for all different numbers, because llguidance does not distinguish numbers."""
    constants = [one.get("enum", [one.get("const")]) if isinstance(one, Mapping) else [None] for one in members]
    is_number = [all(type(value) in {int, float} for value in values) for values in constants]
    numbers = [value for values, is_one in zip(constants, is_number, strict=True) if is_one for value in values]
    if len(set(numbers)) < len(numbers) or sum(is_number) < 2:
        return members
    return [*(one for one, is_one in zip(members, is_number, strict=True) if not is_one), {"enum": numbers}]
