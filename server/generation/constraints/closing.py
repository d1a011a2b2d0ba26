"""Closes the objects of a schema: only properties that the schema names are allowed, unless it says otherwise.

JSON schema allows any other property where nothing is said, and models then invent some. The names of one object may be
spread over `properties`, `allOf`, `$ref`, alternatives and conditions, so all of them are brought together first.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from server.generation.constraints.check import ends_in, matches
from server.generation.constraints.fragment import ConstraintError, under
from server.generation.constraints.limits import Definitions, Schema

CLOSED = (
    "Objects have only the properties that the schema names, unless it sets `additionalProperties`. To allow others, "
    "set it to true, or `allow_additional_properties` for the whole request."
)
"""Reported where objects are closed."""
MAX_REPEATED = 100_000
"""Names that are written again to close objects whose names are spread over several schemas."""
_SAYS_OPEN = frozenset({"additionalProperties", "patternProperties", "propertyNames", "$dynamicRef", "$recursiveRef"})
"""Keywords with which other properties are the schema's own matter."""
_OTHER_NAMES = frozenset({"properties", "patternProperties", "unevaluatedProperties"})
_ANNOTATIONS = frozenset({"type", "title", "description", "default", "examples"})
"""Keywords that say nothing about a name, all of which are strings."""
MAX_LISTED = 100
"""Names in `propertyNames`, each of which becomes a property."""
_MAX_REFERENCES = 10
"""References one behind the other in `propertyNames`."""
_LISTS = ("allOf", "anyOf", "oneOf")
_CONDITIONS = ("if", "then", "else")
_DEPENDENT = ("dependentSchemas", "dependentRequired", "dependencies")
_MAY_NAME = _SAYS_OPEN.union(("unevaluatedProperties",), _CONDITIONS, _DEPENDENT)
"""Keywords that name properties, or allow others, without being enforced."""
_PARTS = frozenset({"$ref", "allOf", "anyOf"})
_NESTING = _PARTS.union(("properties", "patternProperties", "additionalProperties", "items", "prefixItems"))
"""Written keywords with schemas in them."""
_MAX_MATCHES = 500
"""Names that are compared with patterns to find out which schemas apply to them."""
_OWN_MATTER = frozenset({"additionalProperties", "patternProperties", "enum", "const"})
"""Written keywords with which a schema itself restricts the properties, or the values that have them."""
_OF_OBJECTS = _OWN_MATTER.union(("properties", "required", "minProperties"))
"""Written keywords from which `Names` are read."""


@dataclass(frozen=True, slots=True)
class Names:
    """The properties that the schemas of one object name."""

    known: tuple[str, ...] = ()
    declares: bool = False
    """Whether there is a list of properties, which may be empty."""
    is_open: bool = False
    """Whether the schemas say which other properties are allowed."""
    fewest: int = 0
    """The least number of properties."""
    has_patterns: bool = False
    """Whether there are patterns of names."""

    def __or__(self, other: "Names") -> "Names":
        return Names(
            tuple(dict.fromkeys((*self.known, *other.known))),
            self.declares or other.declares,
            self.is_open or other.is_open,
            max(self.fewest, other.fewest),
            self.has_patterns or other.has_patterns,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the schemas say nothing about properties."""
        return self is NO_NAMES or self == NO_NAMES

    @property
    def can_close(self) -> bool:
        """Whether other properties are not allowed."""
        return self.declares and not self.is_open and self.fewest <= len(self.known)


NO_NAMES = Names()


def with_listed_names(schema: Mapping[str, Any], resolve: Callable[[object], Any]) -> Mapping[str, Any]:
    """The schema of a map with its names as properties, if `propertyNames` lists them or has a pattern of them.

    `resolve` returns the schema that a reference names. Raises ConstraintError.
    """
    if "propertyNames" not in schema:
        return schema
    names = _behind_references(schema["propertyNames"], resolve)
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return schema
    said = names.keys() - _ANNOTATIONS
    others = schema.get("additionalProperties", True)
    kept = {keyword: value for keyword, value in schema.items() if keyword != "propertyNames"}
    if not said:
        return kept
    if not _OTHER_NAMES.isdisjoint(schema):
        return schema
    allowed = [names["const"]] if said == {"const"} else names["enum"] if said == {"enum"} else None
    if isinstance(allowed, list) and 0 < len(allowed) <= MAX_LISTED:
        listed = {name: others for name in allowed if isinstance(name, str)}
        return {**kept, "properties": listed, "additionalProperties": False}
    if said == {"pattern"} and isinstance(names["pattern"], str):
        return {**kept, "patternProperties": {names["pattern"]: others}, "additionalProperties": False}
    return schema


def _behind_references(schema: Any, resolve: Callable[[object], Any]) -> Any:
    """A schema, or the one behind it if it is a reference only; the last of too many references."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or schema.keys() - _ANNOTATIONS != {"$ref"}:
            break
        schema = resolve(schema["$ref"])
    return schema


def names_said(schema: Mapping[str, Any], resolve: Callable[[object], Any], spend: Callable[[], None]) -> Names:
    """The properties that a given schema names in keywords that are not enforced, such as `if`.

    Args:
        schema: the schema as the client sent it.
        resolve: the schema that a reference names. Raises ConstraintError.
        spend: called for each schema that is read. Raises ConstraintError if there are too many.
    """
    if _MAY_NAME.isdisjoint(schema):
        return NO_NAMES
    is_open = not _SAYS_OPEN.isdisjoint(schema) or schema.get("unevaluatedProperties", False) is not False
    known: dict[str, None] = {}
    waiting = list(_conditional(schema))
    seen: set[int] = set()
    for here in waiting:
        if not isinstance(here, dict) or id(here) in seen:
            continue
        spend()
        seen.add(id(here))
        known.update(dict.fromkeys((*_strings(here.get("properties")), *_strings(here.get("required")))))
        waiting += _conditional(here)
        waiting += (one for keyword in _LISTS if isinstance(here.get(keyword), list) for one in here[keyword])
        if "$ref" in here:
            waiting.append(resolve(here["$ref"]))
    return Names(tuple(known), is_open=is_open)


def _conditional(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that apply to the same object under a condition; a list of names as a schema that requires them."""
    yield from (schema[keyword] for keyword in _CONDITIONS if keyword in schema)
    for keyword in _DEPENDENT:
        if isinstance(schema.get(keyword), dict):
            for name, one in schema[keyword].items():
                yield {"required": [name, *one]} if isinstance(one, list) else one


def _strings(value: object) -> Iterator[str]:
    return (name for name in value if isinstance(name, str)) if isinstance(value, dict | list) else iter(())


class ObjectCloser:
    """Closes the objects in the definitions of one document, as `json_schema` writes them."""

    def __init__(
        self,
        definitions: Definitions,
        path_of: Callable[[Schema], str],
        said: Callable[[Schema], Names],
        *,
        keeps_open: bool,
    ) -> None:
        """`said` returns what the given form of a schema says beyond the written one. With `keeps_open`, objects are
        not closed, only checked.
        """
        self._definitions = definitions
        self._path_of = path_of
        self._said = said
        self._keeps_open = keeps_open
        self._names: dict[int, Names] = {}
        self._waiting = [("#", False)]
        self._repeated = 0
        self.has_closed = False
        """Whether any object was closed."""

    def close(self) -> Definitions:
        """The definitions with closed objects, without those that are no longer used.

        Raises ConstraintError if too many names must be repeated, or an object could begin another property but have
        none, because its patterns of names match only properties that it has already.
        """
        closed: dict[str, Schema] = {}
        while self._waiting:
            name, is_part = self._waiting.pop()
            written = _part_name(name) if is_part else name
            if written not in closed:
                schema = self._definitions[name]
                closed[written] = self._part(schema) if is_part else self._closed(schema)
        return closed

    def _closed(self, schema: Schema, around: Names = NO_NAMES) -> Schema:
        """The schema of a whole object, or of any other value. `around` has the names of others for the same object."""
        if isinstance(schema, bool) or not _may_be_object(schema):
            return self._part(schema)
        own, of_parts = self._own(schema), self._names_by_keyword(schema)
        told = [keyword for keyword, names in of_parts.items() if not names.is_empty]
        is_alone = own.is_empty and around.is_empty
        if is_alone and len(told) == 1 and self._is_single(schema, told[0]):
            return self._part(schema, told[0])
        context = _together(of_parts["$ref"], of_parts["allOf"], own, around)
        if "anyOf" in told and self._differ(schema["anyOf"], context):
            return self._part(schema, "anyOf", context)
        everything = _together(own, *of_parts.values(), around)
        if everything.has_patterns and self._ends_in_a_name(schema, everything.known):
            return self._closed(self._without_patterns(schema, everything.known), around)
        if self._keeps_open or not everything.can_close:
            return self._part(schema)
        self.has_closed = True
        part = self._part_of(schema)
        if set(everything.known) <= set(own.known):
            return _closed_alone(part, everything.known)
        self._repeated += len(everything.known)
        if self._repeated > MAX_REPEATED:
            raise ConstraintError(
                self._path_of(schema), f"More than {MAX_REPEATED} names in objects of several schemas."
            )
        closing = {"properties": dict.fromkeys(everything.known, True), "additionalProperties": False}
        return {**part, "allOf": [*part.get("allOf", ()), closing]}

    def _ends_in_a_name(self, schema: Mapping[str, Any], known: Sequence[str]) -> bool:
        """Whether an object with all known properties could begin another one, for which there is no name."""
        names = [name for name in known if schema.get("properties", {}).get(name) is not False]
        top = {"type": "object", "properties": dict.fromkeys(names, True), "required": names}
        whole = {**top, "allOf": [self._outline(schema)], "x-guidance": {"whitespace_flexible": False}}
        text = "{" + "".join(f"{json.dumps(name, ensure_ascii=False)}:0," for name in names)
        return bool(names) and ends_in(f"start: %json {json.dumps(whole)}", text)

    def _outline(self, schema: Schema) -> Schema:
        """The parts of a schema that restrict names, without alternatives."""
        if isinstance(schema, bool):
            return schema
        parts = [*([self._definitions[schema["$ref"]]] if "$ref" in schema else []), *schema.get("allOf", ())]
        kept: dict[str, Any] = {"allOf": [self._outline(part) for part in parts]}
        for keyword in ("properties", "patternProperties"):
            kept[keyword] = {name: one is not False for name, one in schema.get(keyword, {}).items()}
        if "additionalProperties" in schema:
            kept["additionalProperties"] = schema["additionalProperties"] is not False
        return kept

    def _without_patterns(self, schema: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
        """A schema whose patterns match known names only, with their schemas in the properties' own."""
        patterns = schema.get("patternProperties", {})
        if not _PARTS.isdisjoint(schema) or len(known) * len(patterns) > _MAX_MATCHES:
            reason = "The patterns match only names of properties that the object has anyway, which is not supported."
            raise ConstraintError(under(self._path_of(schema), "patternProperties"), reason)
        written = {key: value for key, value in schema.items() if key != "patternProperties"}
        properties = {}
        for name in known:
            own = schema.get("properties", {}).get(name, True)
            matching = [one for pattern, one in patterns.items() if matches(pattern, name)]
            is_known = name in schema.get("properties", {}) or matching
            properties[name] = {"allOf": [own, *matching]} if is_known else False
        return {**written, "properties": properties, "additionalProperties": False}

    def _is_single(self, schema: Mapping[str, Any], keyword: str) -> bool:
        """Whether the schemas of a keyword can be closed on their own, because they are not for the same object."""
        return keyword != "allOf" or sum(not self._names_of(part).is_empty for part in schema["allOf"]) == 1

    def _differ(self, branches: Sequence[Schema], context: Names) -> bool:
        """Whether alternatives are to be closed one by one, because they name different properties."""
        names = _together(*map(self._names_of, branches))
        has_room = self._repeated + len(branches) * (len(context.known) + len(names.known)) <= MAX_REPEATED
        return has_room and not context.is_open and (names.is_open or not set(names.known) <= set(context.known))

    def _part(self, schema: Schema, keyword: str = "", around: Names = NO_NAMES) -> Schema:
        """A schema as `_part_of` returns it, or a boolean."""
        if isinstance(schema, bool) or _NESTING.isdisjoint(schema):
            return schema
        return self._part_of(schema, keyword, around)

    def _part_of(self, schema: Mapping[str, Any], keyword: str = "", around: Names = NO_NAMES) -> dict[str, Any]:
        """A schema with all values in it closed, but not itself, unless by the schemas of this keyword."""
        written = dict(schema)
        for name in ("properties", "patternProperties"):
            if name in schema:
                written[name] = {key: self._closed(one) for key, one in schema[name].items()}
        for name in ("items", "additionalProperties"):
            if name in schema:
                written[name] = self._closed(schema[name])
        if "prefixItems" in schema:
            written["prefixItems"] = [self._closed(one) for one in schema["prefixItems"]]
        for name in ("allOf", "anyOf"):
            if name in schema:
                parts = schema[name]
                written[name] = [self._closed(one, around) if name == keyword else self._part(one) for one in parts]
        if "$ref" in schema:
            written["$ref"] = self._reference(schema["$ref"], is_part=keyword != "$ref")
        return written

    def _reference(self, name: str, *, is_part: bool) -> str:
        """The name of a definition in the form that is needed."""
        is_part = is_part and self._names_of(self._definitions[name]).declares
        self._waiting.append((name, is_part))
        return _part_name(name) if is_part else name

    def _names_of(self, schema: Schema) -> Names:
        """All names for an object that a schema applies to."""
        if isinstance(schema, bool):
            return NO_NAMES
        if id(schema) not in self._names:
            self._names[id(schema)] = _together(self._own(schema), *self._names_by_keyword(schema).values())
        return self._names[id(schema)]

    def _names_by_keyword(self, schema: Mapping[str, Any]) -> Mapping[str, Names]:
        if _PARTS.isdisjoint(schema):
            return _NO_PARTS
        referred = [self._definitions[schema["$ref"]]] if "$ref" in schema else []
        parts = {"$ref": referred, "allOf": schema.get("allOf", ()), "anyOf": schema.get("anyOf", ())}
        return {keyword: _together(*map(self._names_of, several)) for keyword, several in parts.items()}

    def _own(self, schema: Mapping[str, Any]) -> Names:
        """The names that a schema itself has."""
        if _OF_OBJECTS.isdisjoint(schema):
            return self._said(schema)
        written = Names(
            tuple(dict.fromkeys((*schema.get("properties", ()), *schema.get("required", ())))),
            "properties" in schema,
            not _OWN_MATTER.isdisjoint(schema),
            schema.get("minProperties", 0),
            "patternProperties" in schema,
        )
        return _together(written, self._said(schema))


_NO_PARTS = dict.fromkeys(("$ref", "allOf", "anyOf"), NO_NAMES)


def _together(*several: Names) -> Names:
    return reduce(or_, [names for names in several if names is not NO_NAMES] or [NO_NAMES])


def _part_name(name: str) -> str:
    """The name of a definition that is a part of an object, and so must not be closed itself."""
    return f"{'#/$defs/root' if name == '#' else name}-part"


def _may_be_object(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type", "object")
    return "object" in types if isinstance(types, list) else types == "object"


def _closed_alone(schema: Mapping[str, Any], known: Sequence[str]) -> Schema:
    """The schema of an object, with these properties only, all of which it names itself."""
    properties = {**dict.fromkeys(known, True), **schema.get("properties", {})}
    return {**schema, "properties": properties, "additionalProperties": False}
