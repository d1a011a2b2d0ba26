"""Grammars of values in notations other than JSON, from their JSON schema: Python's literals, and Gemma's objects."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.generation.constraints.fragment import Fragment, literal, under
from server.generation.constraints.json_schema import BOUNDED, json_fragment, read_schema
from server.generation.parsing.call_grammar import GrammarBuilder, OfferedTool

_TYPES = ("string", "number", "boolean", "null", "array", "object")
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OF_TYPES: Mapping[str, frozenset[str]] = {
    "number": _OF_NUMBERS,
    "integer": _OF_NUMBERS,
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""Enforced keywords, by type."""
_KINDS_BY_NAME = {"integer": "number"}
_NOT_ENFORCED = "Not enforced: this model's format of calls is not JSON."
_NO_KEY = "Omitted: this model's format of calls cannot write this name."
_SEPARATOR = "/, ?/"


@dataclass(frozen=True, slots=True)
class Keys:
    """How a notation spells an object's keys."""

    spelt: Callable[[str], Sequence[str]]
    """All spellings of a key; none if the notation cannot write it."""
    other: str
    """An expression for keys that the schema does not name."""
    after: str
    """The text between a key and its value, as a Lark terminal."""


@dataclass(frozen=True, slots=True)
class Writing:
    """How a notation spells values. Numbers and brackets are as in JSON."""

    string: Fragment
    """A grammar of any string."""
    constant: Callable[[str], Fragment]
    """Makes the grammar of one string."""
    names: Mapping[bool | None, str]
    """The notation's names of true, false and null."""
    keys: Keys


class NotationGrammar:
    """The grammar of one tool's arguments. Each value is a rule, or an expression whose rules are in `_rules`."""

    def __init__(self, builder: GrammarBuilder, tool: OfferedTool, writing: Writing) -> None:
        self._wanted = builder
        self._tool = tool
        self._writing = writing
        self._rules: list[str] = []
        self._definitions: Mapping[str, Any] = {}
        self._named: dict[str, str] = {}
        self._any: str | None = None

    def arguments(self, keys: Keys) -> Fragment:
        """All arguments, in the schema's order, with commas. Raises ConstraintError for a refused schema."""
        tool = self._tool
        read = read_schema(tool.object_schema, tool.path, strict=tool.is_strict, is_open=tool.is_open)
        tool.report(read.notices)
        self._definitions = {"#": read.schema}
        self._definitions |= {f"#/$defs/{name}": one for name, one in read.schema.get("$defs", {}).items()}
        for keyword in read.schema.keys() - _OF_TYPES["object"] - {"type", "$defs"}:
            self._tool.leave_out(under(self._tool.path, keyword), _NOT_ENFORCED)
        members = self._members(read.schema, self._tool.path, keys)
        return Fragment(members, "".join(self._rules))

    def _rule(self, expression: str, name: str = "") -> str:
        name = name or self._wanted.new_name()
        self._rules.append(f"{name}: {expression}\n")
        return name

    def _part(self, fragment: Fragment) -> str:
        self._rules.append(fragment.rules)
        return fragment.start

    def _value(self, schema: Any, path: str) -> str:
        if not isinstance(schema, Mapping) or not schema.keys() - {"$defs"}:
            return self._anything()
        if "enum" in schema or "const" in schema:
            return self._one_of(schema, path)
        if "properties" not in schema and "$ref" in schema:
            self._leave_out(schema, path, "$ref")
            return self._definition(schema["$ref"], path)
        if "properties" not in schema and "anyOf" in schema:
            self._leave_out(schema, path, "anyOf", "type")
            at = under(path, "anyOf")
            return _either(self._value(one, under(at, index)) for index, one in enumerate(schema["anyOf"]))
        types = _types(schema)
        self._leave_out(schema, path, "type", *(keyword for one in types for keyword in _OF_TYPES.get(one, ())))
        return _either(self._typed(one, schema, path) for one in types)

    def _leave_out(self, schema: Mapping[str, Any], path: str, *enforced: str) -> None:
        """Report all keywords of the schema as not enforced, except these."""
        for keyword in schema:
            if keyword not in (*enforced, "$defs"):
                self._tool.leave_out(under(path, keyword), _NOT_ENFORCED)

    def _typed(self, kind: str, schema: Mapping[str, Any], path: str) -> str:
        match kind:
            case "string":
                return self._string()
            case "boolean":
                return f"({literal(self._writing.names[True])} | {literal(self._writing.names[False])})"
            case "null":
                return literal(self._writing.names[None])
            case "array":
                return self._array(schema, path)
            case "object":
                return self._rule(f'"{{" {self._members(schema, path, self._writing.keys)} "}}"')
            case _:
                bounds = {key: value for key, value in schema.items() if key in _OF_NUMBERS}
                return self._part(json_fragment({"type": kind, **bounds}, BOUNDED))

    def _string(self) -> str:
        return self._part(self._writing.string)

    def _array(self, schema: Mapping[str, Any], path: str) -> str:
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0 or schema.get("items") is False:
            return '"[" "]"'
        item = self._value(schema.get("items", True), under(path, "items"))
        last = "" if most is None else most - 1
        several = f"{item} ({_SEPARATOR} {item}){{{max(fewest - 1, 0)},{last}}}"
        return self._rule(f'"[" {several} "]"' if fewest else f'"[" ({several})? "]"')

    def _members(self, schema: Mapping[str, Any], path: str, keys: Keys) -> str:
        """The inside of an object: declared properties in the schema's order, then others."""
        required = schema.get("required", ())
        entries: list[tuple[str, bool]] = []
        spelt_names: list[str] = []
        for key, one in schema.get("properties", {}).items():
            at = under(under(path, "properties"), key)
            spelt = keys.spelt(key)
            spelt_names += spelt
            if not spelt:
                self._tool.leave_out(at, _NO_KEY)
            elif one is not False:
                written = _either(map(literal, spelt))
                entries.append((f"{written} {keys.after} {self._value(one, at)}", key in required))
        if not set(required) <= schema.get("properties", {}).keys():
            self._tool.leave_out(under(path, "required"), _NOT_ENFORCED)
        others = schema.get("additionalProperties", True)
        other = "" if others is False else self._other(others, under(path, "additionalProperties"), keys, spelt_names)
        return self._sequence(entries, other)

    def _other(self, schema: Any, path: str, keys: Keys, known: Sequence[str]) -> str:
        """A member that the schema does not name."""
        terminal = self._wanted.new_name().upper()
        but = f" & ~({' | '.join(map(literal, known))})" if known else ""
        self._rule(f"/{keys.other}/{but}", terminal)
        return self._rule(f"{terminal} {keys.after} {self._value(schema, path)}")

    def _sequence(self, entries: Sequence[tuple[str, bool]], other: str) -> str:
        """Comma-separated entries, some of them required, then any number of others."""
        beginnings = [f"{other} ({_SEPARATOR} {other})*", '""'] if other else ['""']
        after = self._rule(f"({_SEPARATOR} {other})*" if other else '""')
        for entry, is_required in reversed(entries):
            name = self._rule(entry)
            beginnings = [f"{name} {after}", *([] if is_required else beginnings)]
            after = self._rule(f"{_SEPARATOR} {name} {after}" if is_required else f"({_SEPARATOR} {name})? {after}")
        return self._rule(" | ".join(beginnings))

    def _definition(self, reference: str, path: str) -> str:
        if reference not in self._named:
            self._named[reference] = name = self._wanted.new_name()
            self._rule(self._value(self._definitions[reference], path), name)
        return self._named[reference]

    def _anything(self) -> str:
        """Any value."""
        if self._any is None:
            self._any = self._wanted.new_name()
            self._rule(_either(self._typed(one, {}, "") for one in _TYPES), self._any)
        return self._any

    def _one_of(self, schema: Mapping[str, Any], path: str) -> str:
        """One of the constants, unless any of them is an array or an object."""
        constants = schema.get("enum", [schema.get("const")])
        types = [_KINDS_BY_NAME.get(name, name) for name in _types(schema)]
        fitting = [value for value in constants if _kind(value) in types]
        if not fitting or any(isinstance(value, list | dict) for value in fitting):
            self._leave_out(schema, path)
            return self._anything()
        self._leave_out(schema, path, "enum" if "enum" in schema else "const", "type")
        return _either(map(self._constant, fitting))

    def _constant(self, value: str | float | bool | None) -> str:
        if isinstance(value, str):
            return self._part(self._writing.constant(value))
        if isinstance(value, bool) or value is None:
            return literal(self._writing.names[value])
        return literal(json.dumps(value))


def _either(expressions: Iterable[str]) -> str:
    return f"({' | '.join(dict.fromkeys(expressions))})"


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    """The types that a schema allows."""
    given = schema.get("type", _TYPES)
    return [given] if isinstance(given, str) else given


def _kind(value: Any) -> str:
    """The JSON type of a value."""
    kinds = {str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}
    return kinds.get(type(value), "number")
