"""Tables in Markdown from JSON schemas: what may stand in a request, and what stands in an answer."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from server.api.answer_object import components
from server.api.capabilities import FieldCapability, resolve

Schema = Mapping[str, Any]


def request_table(fields: Mapping[str, FieldCapability]) -> str:
    """A row for each field, and below it rows for what it consists of."""
    lines = ["| field | values | default | |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required" if field.required else "" if field.default is None else f"`{json.dumps(field.default)}`"
        lines.append(_row(f"`{name}`", _values(field.values), default, _notes(field)))
        for path, schema, is_required in _parts(name, field.values):
            needed = "required" if is_required else ""
            lines.append(_row(f"`{path}`", _values(schema), needed, _treatment(schema)))
    return "\n".join([*lines, ""])


def answer_table(answer: Schema) -> str:
    """A row for each property of an answer, at whatever depth. The schema may refer to AnswerObjects."""
    return _table(resolve(answer, components(answer)))


def _table(schema: Schema) -> str:
    lines = ["| property | values | |", "|---|---|---|"]
    for path, part, is_required in _parts("", schema):
        is_there = is_required or part.get("default") is not None  # the server always writes constants
        values = _values(part, with_null=True) if is_there else f"optional {_values(part)}"
        lines.append(_row(f"`{path}`", values, part.get("description", "")))
    return "\n".join([*lines, ""])


def _parts(path: str, schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """All that lies within a value: its path, its schema and whether it must be there. Models come with their name."""
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


def _notes(field: FieldCapability) -> str:
    notes = [field.description or ""]
    notes += [f"Needs `{other}`." for other in field.requires]
    if field.excludes:
        notes.append(f"Not with {', '.join(f'`{other}`' for other in field.excludes)}.")
    return " ".join(note for note in notes if note)


def _treatment(schema: Schema) -> str:
    """What a part does, and how it is treated if it is not honoured."""
    treatments = {
        "refused": " Anything else is refused.",
        "no_effect": " It has no effect.",
        "hint": " Left out and reported.",
    }
    return schema.get("description", "") + treatments.get(schema.get("x-support", ""), "")


def _row(*cells: str) -> str:
    text = " | ".join(cell.replace("|", r"\|") for cell in cells)
    return f"| {text} |"


def _values(schema: Schema, *, with_null: bool = False) -> str:
    """A JSON schema in a few words."""
    if options := schema.get("anyOf") or schema.get("oneOf"):
        texts = [_values(option, with_null=with_null) for option in options if with_null or not _is_null(option)]
        return " or ".join(dict.fromkeys(texts)) or "null"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        length = _range(schema.get("minItems"), schema.get("maxItems"))
        return f"array of {_inner(schema.get('items', {}))}{_entries(length)}"
    if kind == "object" and isinstance(values := schema.get("additionalProperties"), dict):
        return f"object of {_inner(values)}"
    return f"{kind} {_limits(schema)}".strip()


def _inner(schema: Schema) -> str:
    """What an array or an object consists of, where null is a value like others."""
    text = _values(schema, with_null=True)
    return f"({text})" if " or " in text or ", " in text else text


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
    """Bounds that somebody could meet; those of the integer type itself are left out."""
    low, high = (None if bound is None or abs(bound) >= 2**31 - 1 else bound for bound in (low, high))
    if low is None and high is None:
        return ""
    if high is None:
        return f"≥ {low}"
    if low == high:
        return f"{low}"
    return f"≤ {high}" if low is None else f"{low}..{high}"
