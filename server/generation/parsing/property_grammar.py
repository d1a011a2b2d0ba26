"""Grammars of arguments that are written one by one, with the text of strings as it is."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from server.generation.constraints.errors import under
from server.generation.constraints.fragment import FREE_TEXT, Fragment, either, literal, repeated, sequence, text
from server.generation.constraints.patterns import read_terminal
from server.generation.parsing.call_grammar import OfferedTool, Wanted, optional
from server.generation.parsing.names import IN_TAG
from server.generation.parsing.typed_arguments import allowed_types, resolved

_PLAIN = frozenset({"type", "properties", "required", "additionalProperties", "title", "description", "$schema"})
_SAYS_NOTHING = frozenset({"type", "title", "description", "$schema"})
"""Of an object, these allow any arguments."""
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_NOT_OF_STRINGS = "Not enforced: this model's format writes strings as they are."
_NOT_PLAIN = "Not enforced: this model writes arguments one by one, and these are no object of known properties."
_DEFINITIONS = ("$defs", "definitions")
_REFERENCE_ELSEWHERE = re.compile(r"'\$(?:dynamicRef|ref)': (?!'#/(?:\$defs|definitions)/)")


@dataclass(frozen=True, slots=True)
class PropertyTags:
    """What stands around an argument."""

    begin: Callable[[str, bool], Fragment]
    """By its key, and whether its value is a string that is written as it is."""
    any_begin: Fragment
    """The same for any key, with a string."""
    end: str
    after: Fragment
    """After the end."""
    tells_strings: bool = False
    """Whether what is written shows that a value is a string, so that JSON may stand there as well."""
    barred: tuple[str, ...] = ()
    """Texts that the text of a string cannot have, besides the end: they would be read as something else."""


def arguments(wanted: Wanted, tool: OfferedTool, tags: PropertyTags) -> Fragment:
    """The arguments of a call, in the schema's order; anything in these tags where it is no plain object.

    Not held to the schema are strings, but for their constants, and what may be a string besides something else. Where
    any arguments are taken, nothing keeps a model from giving one twice, which makes the call none.
    """
    properties = _properties(tool.schema)
    if properties is None:
        if not tool.schema.keys() <= _SAYS_NOTHING:
            tool.leave_out(tool.path, _NOT_PLAIN)
        return repeated(wanted.rule(sequence(tags.any_begin, _string(wanted, tags))))
    required = tool.schema.get("required", ())
    found = []
    for key, schema in properties.items():
        argument = _argument(wanted, tool, tags, key, schema)
        found.append(argument if key in required else optional(argument))
    return sequence(*found) if found else text("")


def _argument(wanted: Wanted, tool: OfferedTool, tags: PropertyTags, key: str, schema: Any) -> Fragment:
    schema = resolved(schema, tool.schema)
    types = allowed_types(schema)
    written = []
    path = under(under(tool.path, "properties"), key)
    if "string" in types:
        constants = list(_constants(schema))
        if constants:
            value = _constant(wanted, tags, constants)
        elif tool.pattern is not None:
            value = _string(wanted, tags, read_terminal(tool.pattern, tool.path))
        else:
            value = _string(wanted, tags)
            for keyword in (keyword for keyword in _OF_STRINGS if keyword in schema):
                tool.leave_out(under(path, keyword), _NOT_OF_STRINGS)
        written.append(sequence(tags.begin(key, True), value))
    if "string" not in types or (tags.tells_strings and types != {"string"}):
        definitions = {name: tool.schema[name] for name in _DEFINITIONS if name in tool.schema}
        value = tool.json({**definitions, **schema}, path)
        written.append(sequence(tags.begin(key, False), value, wanted.text(tags.end), tags.after))
    return either(*written)


def _constant(wanted: Wanted, tags: PropertyTags, constants: Iterable[str]) -> Fragment:
    """One of them, and the end of it."""
    head, tail = wanted.split(tags.end)
    ended = either(*(text(constant + head) for constant in constants))
    return sequence(ended, *([tail] if tail.start else []), tags.after)


def _string(wanted: Wanted, tags: PropertyTags, body: str = FREE_TEXT) -> Fragment:
    """A text that a terminal fits, and the end of it."""
    if not tags.barred:
        return sequence(wanted.until(tags.end, body), tags.after)
    barred = "|".join(map(literal, tags.barred))
    terminal = wanted.new_name().upper()
    rule = f"{terminal}: {body} & ~({FREE_TEXT} ({barred}) {FREE_TEXT})\n"
    ended = wanted.until(tags.end, terminal)
    return sequence(Fragment(ended.start, rule + ended.rules), tags.after)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The properties of an object of which all is known by them; None for any other."""
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or not schema.keys() <= _PLAIN.union(_DEFINITIONS):
        return None
    if not properties and schema.get("additionalProperties") is not False:
        return None
    are_known = all(isinstance(value, Mapping) and IN_TAG.fullmatch(key) for key, value in properties.items())
    if not are_known or not properties.keys() >= set(schema.get("required", ())):
        return None
    return None if _REFERENCE_ELSEWHERE.search(repr(schema)) else properties


def _constants(schema: Mapping[str, Any]) -> Iterator[str]:
    """The strings that it allows, if it says which."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return (value for value in values if isinstance(value, str))
