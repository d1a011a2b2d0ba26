"""Arguments that are written one by one instead of as a JSON object: reading them, and their grammars."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.generation.constraints.fragment import FREE_TEXT, Fragment, either, literal, repeated, sequence, text, under
from server.generation.constraints.texts import Regex
from server.generation.notices import Notice
from server.generation.parsing.call_grammar import GrammarBuilder, OfferedTool, optional
from server.generation.parsing.json_text import PYTHON, escaped, whole_value
from server.generation.parsing.parts import CallArguments, Kept, Part, arguments
from server.generation.parsing.reader import IN_TAG, Steps, T


class Members:
    """Writes the members of an object, whose keys must not repeat."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def begin(self, key: str) -> Steps[bool]:
        """Emit what precedes a member's value. Returns False if the key was used before."""
        if key in self._keys:
            return False
        yield CallArguments(f'{", " if self._keys else "{"}"{escaped(key)}": ')
        self._keys.add(key)
        return True

    def end(self) -> Sequence[Part]:
        """Close the object."""
        return arguments("}" if self._keys else "{}")


def quoted(reading: Steps[T]) -> Steps[bool]:
    """Emit quotes around a reading that uses `in_quotes`. Returns whether it succeeded."""
    yield CallArguments('"')
    if not (yield from reading):
        return False
    yield CallArguments('"')
    return True


def in_quotes(text: str) -> Sequence[Part]:
    """A piece of a raw string, escaped for JSON."""
    return arguments(escaped(text))


_ANY = frozenset({"null", "boolean", "number", "string", "array", "object"})
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_TYPES_BY_NAME = {"integer": "number"}
_TYPES_BY_BEGINNING = {"{": "object", "[": "array", '"': "string", "n": "null", "t": "boolean", "f": "boolean"}


class TypedArguments:
    """Writes arguments as a JSON object. Strings are emitted as they come, other values when complete."""

    def __init__(self, schema: Any) -> None:
        """`schema` is the JSON schema of the object."""
        self._schema = schema
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._members = Members()
        self._types = _ANY
        self._kept = Kept()

    def begin(self, key: str) -> Steps[bool]:
        """Begin an argument. Returns False if the key was used before."""
        if not (yield from self._members.begin(key)):
            return False
        self._types = allowed_types(resolved(self._properties.get(key), self._schema))
        yield from arguments('"' if self._is_string else "")
        return True

    def text(self, piece: str) -> Iterable[Part]:
        """Add a piece of the argument's value."""
        return in_quotes(piece) if self._is_string else self._kept(piece)

    def end(self) -> Sequence[Part]:
        """The argument's value is complete."""
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
    """The value as JSON. It is a string unless it parses as another type that is allowed."""
    value = whole_value(text) or whole_value(text, PYTHON)
    if value is not None:
        kind = _TYPES_BY_BEGINNING.get(value[0], "number")
        if kind != "string" and (kind in types or "string" not in types):
            return value
    return f'"{escaped(text)}"'


def resolved(schema: Any, root: Any) -> Any:
    """The definition that a schema refers to, otherwise the schema itself."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    found = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
    definitions = root.get(found[1]) if found and isinstance(root, Mapping) else None
    return definitions.get(found[2], schema) if found and isinstance(definitions, Mapping) else schema


def allowed_types(schema: Any) -> frozenset[str]:
    """The types that a schema allows; all types if it does not say so in a known way."""
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


_PLAIN = frozenset({"type", "properties", "required", "additionalProperties", "title", "description", "$schema"})
_SAYS_NOTHING = frozenset({"type", "title", "description", "$schema", "additionalProperties"})
"""Keywords that do not restrict an object's arguments."""
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_NOT_OF_STRINGS = "Not enforced: this model's format writes strings unquoted."
_ONLY_NAMED = "Calls have only the arguments that the schema names: this model's format does not prevent repeated ones."
_NOT_PLAIN = "Not enforced: this model's format needs an object with known properties."
_DEFINITIONS = ("$defs", "definitions")
_REFERENCE_ELSEWHERE = re.compile(r"'\$(?:dynamicRef|ref)': (?!'#/(?:\$defs|definitions)/)")


@dataclass(frozen=True, slots=True)
class PropertyTags:
    """The tags around an argument."""

    begin: Callable[[str, bool], Fragment]
    """Makes the opening tag from the key and whether the value is a raw string."""
    any_begin: Fragment
    """The opening tag of a raw string with any key."""
    end: str
    after: Fragment
    """The text after the closing tag."""
    tells_strings: bool = False
    """Whether the tags mark raw strings, so that other strings can be written as JSON."""
    barred: tuple[str, ...] = ()
    """Texts other than the end that a raw string cannot contain, because they would be parsed."""


def tagged_arguments(builder: GrammarBuilder, tool: OfferedTool, tags: PropertyTags) -> Fragment:
    """A call's arguments in the schema's order; any arguments if the schema is not a plain object.

    Strings are not constrained, except constants; nor are values that may also be strings. With any arguments, a model
    could repeat one, which makes the call invalid.
    """
    schema = tool.schema
    is_open = schema.get("additionalProperties", bool(tool.is_open)) is not False
    properties = _properties(schema, is_open=is_open)
    if properties is None:
        if not schema.keys() <= _SAYS_NOTHING or schema.get("additionalProperties", True) not in (True, {}):
            tool.leave_out(tool.path, _NOT_PLAIN)
        return repeated(builder.rule(sequence(tags.any_begin, _string(builder, tags))))
    if is_open:
        tool.report([Notice(under(tool.path, "additionalProperties"), _ONLY_NAMED)])
    elif "additionalProperties" not in schema:
        tool.close()
    required = schema.get("required", ())
    found = []
    for key, schema in properties.items():
        argument = _argument(builder, tool, tags, key, schema)
        found.append(argument if key in required else optional(argument))
    return sequence(*found) if found else text("")


def _argument(builder: GrammarBuilder, tool: OfferedTool, tags: PropertyTags, key: str, schema: Any) -> Fragment:
    schema = resolved(schema, tool.schema)
    types = allowed_types(schema)
    written = []
    path = under(under(tool.path, "properties"), key)
    if "string" in types:
        constants = list(_constants(schema))
        if constants:
            value = _constant(builder, tags, constants)
        elif tool.pattern is not None:
            value = _string(builder, tags, Regex(tool.pattern, tool.path).terminal())
        else:
            value = _string(builder, tags)
            for keyword in (keyword for keyword in _OF_STRINGS if keyword in schema):
                tool.leave_out(under(path, keyword), _NOT_OF_STRINGS)
        written.append(sequence(tags.begin(key, True), value))
    if "string" not in types or (tags.tells_strings and types != {"string"}):
        definitions = {name: tool.schema[name] for name in _DEFINITIONS if name in tool.schema}
        value = tool.json({**definitions, **schema}, path)
        written.append(sequence(tags.begin(key, False), value, builder.text(tags.end), tags.after))
    return either(*written)


def _constant(builder: GrammarBuilder, tags: PropertyTags, constants: Iterable[str]) -> Fragment:
    """One of the constants, then the closing tag."""
    head, tail = builder.split(tags.end)
    ended = either(*(text(constant + head) for constant in constants))
    return sequence(ended, *([tail] if tail.start else []), tags.after)


def _string(builder: GrammarBuilder, tags: PropertyTags, body: str = FREE_TEXT) -> Fragment:
    """A text that a terminal matches, then the closing tag."""
    if not tags.barred:
        return sequence(builder.until(tags.end, body), tags.after)
    barred = "|".join(map(literal, tags.barred))
    terminal = builder.new_name().upper()
    rule = f"{terminal}: {body} & ~({FREE_TEXT} ({barred}) {FREE_TEXT})\n"
    ended = builder.until(tags.end, terminal)
    return sequence(Fragment(ended.start, rule + ended.rules), tags.after)


def _properties(schema: Mapping[str, Any], *, is_open: bool) -> Mapping[str, Any] | None:
    """The properties of an object that allows no others and needs nothing else; None for any other object."""
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or not schema.keys() <= _PLAIN.union(_DEFINITIONS):
        return None
    if not properties and is_open:
        return None
    are_known = all(isinstance(value, Mapping) and IN_TAG.fullmatch(key) for key, value in properties.items())
    if not are_known or not properties.keys() >= set(schema.get("required", ())):
        return None
    return None if _REFERENCE_ELSEWHERE.search(repr(schema)) else properties


def _constants(schema: Mapping[str, Any]) -> Iterator[str]:
    """The strings that a schema lists; none if it does not list values."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return (value for value in values if isinstance(value, str))
