"""Arguments whose values were written as plain text: their types are those of the tool's schema."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.generation.parsing.emit import Kept
from server.generation.parsing.json_text import escaped, whole_value
from server.generation.parsing.members import Members, in_quotes
from server.generation.parsing.output_parser import arguments
from server.generation.parsing.parts import Part
from server.generation.parsing.python_text import PYTHON
from server.generation.parsing.reader import Steps

_ANY = frozenset({"null", "boolean", "number", "string", "array", "object"})
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_TYPES_BY_NAME = {"integer": "number"}
_TYPES_BY_BEGINNING = {"{": "object", "[": "array", '"': "string", "n": "null", "t": "boolean", "f": "boolean"}


class TypedArguments:
    """Makes a JSON object of arguments. The text of a string is passed on as it comes, other values when complete."""

    def __init__(self, schema: Any) -> None:
        """`schema` is that of the object."""
        self._schema = schema
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._members = Members()
        self._types = _ANY
        self._kept = Kept()

    def begin(self, key: str) -> Steps[bool]:
        """The next argument begins; False if it was given before."""
        if not (yield from self._members.begin(key)):
            return False
        self._types = allowed_types(resolved(self._properties.get(key), self._schema))
        yield from arguments('"' if self._is_string else "")
        return True

    def text(self, piece: str) -> Iterable[Part]:
        """The next piece of its value."""
        return in_quotes(piece) if self._is_string else self._kept(piece)

    def end(self) -> Sequence[Part]:
        """Its value is complete."""
        if self._is_string:
            return arguments('"')
        value = _typed(self._kept.text, self._types)
        self._kept = Kept()
        return arguments(value)

    def close(self) -> Sequence[Part]:
        """There are no more arguments."""
        return self._members.end()

    @property
    def _is_string(self) -> bool:
        return self._types == {"string"}


def _typed(text: str, types: frozenset[str]) -> str:
    """The value as JSON; a string if it is nothing else, or if nothing else than a string is allowed for it."""
    value = whole_value(text) or whole_value(text, PYTHON)
    if value is not None:
        kind = _TYPES_BY_BEGINNING.get(value[0], "number")
        if kind != "string" and (kind in types or "string" not in types):
            return value
    return f'"{escaped(text)}"'


def resolved(schema: Any, root: Any) -> Any:
    """What a schema refers to, if that is one of the definitions at the root; otherwise itself."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    found = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
    definitions = root.get(found[1]) if found and isinstance(root, Mapping) else None
    return definitions.get(found[2], schema) if found and isinstance(definitions, Mapping) else schema


def allowed_types(schema: Any) -> frozenset[str]:
    """The types that a schema allows; all of them where it does not say, or says it in a way that is not known here."""
    match schema:
        case {"type": str(name)}:
            return frozenset({_TYPES_BY_NAME.get(name, name)})
        case {"type": [*names]}:
            return frozenset(_TYPES_BY_NAME.get(name, name) for name in names if isinstance(name, str))
        case {"anyOf": [*options]} | {"oneOf": [*options]}:
            return frozenset().union(*map(allowed_types, options))
        case {"enum": [*values]} if all(isinstance(value, str) for value in values):
            return frozenset({"string"})
        case _:
            return _ANY
