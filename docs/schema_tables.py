"""Tables in Markdown from JSON schemas: the fields of a request, and the properties of an answer."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marked_pages import code, table

from server.api.capabilities import FieldCapability

Schema = Mapping[str, Any]
MANY_EXCLUDED = 3
"""Fields that exclude each other are listed once below their table if there are so many."""
_SUPPORT = {"hint": "**Hint.** ", "no_effect": "**No effect.** ", "refused": "**Refused** unless empty. "}
_ORDER = ["honoured", "hint", "no_effect", "refused"]


@dataclass(frozen=True, slots=True)
class SchemaTables:
    """Writes tables in which objects that are described elsewhere are links."""

    expand: Callable[[Any], Any]
    """The schema with references written out, except references to objects that have a section."""
    link: Callable[[str], str]
    """Markdown that links to the section of an object."""
    purpose: Callable[[str], str]
    """The description of such an object."""

    def request(self, fields: Mapping[str, FieldCapability], schemas: Mapping[str, Schema]) -> str:
        """The fields of a request, those that are honoured first; below it, which of them exclude each other."""
        ordered = sorted(fields.items(), key=lambda entry: _ORDER.index(entry[1].support))
        listed = {name: field for name, field in ordered if field.support != "refused"}
        refused = [name for name, field in ordered if field.support == "refused"]
        cliques = list(_cliques(fields))
        exclusive = {name for clique in cliques for name in clique}
        rows: list[tuple[str, ...]] = []
        for name, field in listed.items():
            schema = self.expand(schemas[name])
            default = (
                "required" if field.required else "" if field.default is None else f"`{json.dumps(field.default)}`"
            )
            notes = _notes(field, is_exclusive=name in exclusive)
            text = " ".join(one for one in (_SUPPORT.get(field.support, "") + (field.description or ""), notes) if one)
            rows.append((f"`{name}`", self._values(schema), default, text.strip()))
            rows += self._inner_rows(name, schema)
        text = table(("field", "values", "default", "description"), rows) if rows else ""
        for clique in cliques:
            text += f"\n{_said_once(clique, fields)}\n"
        if refused:
            text += f"\nRefused unless empty, false or null: {code(refused)}.\n"
        return text

    def object_of_a_request(self, schema: Schema) -> str:
        """The fields of an object within a request."""
        return table(("field", "values", "needed", "description"), self._inner_rows("", self.expand(schema)))

    def answer(self, schema: Schema) -> str:
        """The properties of an answer, or of an object within one."""
        rows = []
        for path, part, is_required in _parts("", self.expand(schema)):
            is_there = is_required or part.get("default") is not None  # the server always writes constants
            values = self._values(part, with_null=True) if is_there else f"optional {self._values(part)}"
            rows.append((f"`{path}`", values, self._description(part)))
        return table(("property", "values", "description"), rows)

    def values(self, schema: Schema) -> str:
        """A schema in a few words, with links."""
        return self._values(self.expand(schema), with_null=True)

    def _inner_rows(self, path: str, schema: Schema) -> list[tuple[str, ...]]:
        return [
            (f"`{inner}`", self._values(part), "required" if is_required else "", self._treated(part))
            for inner, part, is_required in _parts(path, schema)
        ]

    def _treated(self, part: Schema) -> str:
        """The description of a field within an object, and how it is treated if it is not honoured."""
        return (_SUPPORT.get(part.get("x-support", ""), "") + self._description(part)).strip()

    def _description(self, part: Schema) -> str:
        """Its own, or else the description of the object that it is."""
        if "description" in part:
            return str(part["description"])
        inner = part.get("items", part)
        options = [one for one in inner.get("anyOf", [inner]) if not _is_null(one)]
        return self.purpose(options[0]["$ref"]) if len(options) == 1 and "$ref" in options[0] else ""

    def _values(self, schema: Schema, *, with_null: bool = False) -> str:
        """A JSON schema in a few words."""
        if "$ref" in schema:
            return self.link(schema["$ref"])
        if options := schema.get("anyOf") or schema.get("oneOf"):
            texts = [
                self._values(option, with_null=with_null) for option in options if with_null or not _is_null(option)
            ]
            return " or ".join(dict.fromkeys(texts)) or "null"
        if "const" in schema:
            return f"`{json.dumps(schema['const'])}`"
        if "enum" in schema:
            return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
        kind = schema.get("type", "anything")
        if kind == "array":
            length = _range(schema.get("minItems"), schema.get("maxItems"))
            return f"array of {self._inner(schema.get('items', {}))}{_entries(length)}"
        if kind == "object" and isinstance(values := schema.get("additionalProperties"), dict):
            return f"object of {self._inner(values)}"
        return f"{kind} {_limits(schema)}".strip()

    def _inner(self, schema: Schema) -> str:
        """The entries of an array or an object, where null is a value like others."""
        text = self._values(schema, with_null=True)
        return f"({text})" if " or " in text or ", " in text else text


def _parts(path: str, schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """All that lies within a value, at any depth: its path, its schema and whether it is required."""
    for option in [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
        yield from _parts(path, option)
    if isinstance(items := schema.get("items"), dict):
        yield from _parts(f"{path}[]", items)
    if isinstance(values := schema.get("additionalProperties"), dict):
        yield from _parts(f"{path}.*", values)
    for name, part in schema.get("properties", {}).items():
        inner = f"{path}.{name}" if path else name
        yield inner, part, name in schema.get("required", [])
        yield from _parts(inner, part)


def _cliques(fields: Mapping[str, FieldCapability]) -> Iterator[Sequence[str]]:
    """Fields of one table that exclude each other, and exclude the same others."""
    around = {name: frozenset({name, *field.excludes}) for name, field in fields.items()}
    sizes = Counter(around.values())
    for neighbours, size in sizes.items():
        if size >= MANY_EXCLUDED:
            yield [name for name in fields if around[name] == neighbours]


def _said_once(clique: Sequence[str], fields: Mapping[str, FieldCapability]) -> str:
    others = [name for name in fields[clique[0]].excludes if name not in clique]
    also = f" None of them goes with {code(others, ' or ')}." if others else ""
    return f"At most one of {code(clique, ' and ')} can be set.{also}"


def _notes(field: FieldCapability, *, is_exclusive: bool) -> str:
    notes = [f"Needs `{other}`." for other in field.requires]
    if field.excludes and not is_exclusive:
        notes.append(f"Not with {code(field.excludes)}.")
    return " ".join(notes)


def _is_null(schema: Schema) -> bool:
    return schema.get("type") == "null"


def _entries(length: str) -> str:
    return f", {length} {'entry' if length == '1' else 'entries'}" if length else ""


def _limits(schema: Schema) -> str:
    """Bounds of a number, or of a string's length."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f"> {schema['exclusiveMinimum']}" + (f", ≤ {high}" if high is not None else "")
    if "exclusiveMaximum" in schema:
        return f"≥ {low}, < {schema['exclusiveMaximum']}"
    length = _range(schema.get("minLength"), schema.get("maxLength"))
    return _range(low, high) or (f"{length} characters" if length else "")


def _range(low: float | None, high: float | None) -> str:
    """Bounds that a request could meet; bounds of the integer type itself are omitted."""
    low, high = (None if bound is None or abs(bound) >= 2**31 - 1 else bound for bound in (low, high))
    if low is None and high is None:
        return ""
    if high is None:
        return f"≥ {low}"
    if low == high:
        return f"{low}"
    return f"≤ {high}" if low is None else f"{low}..{high}"
