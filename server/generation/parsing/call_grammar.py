"""Grammars of answers with calls, so that a call that a model begins cannot be but whole, and of an offered tool."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from server.generation.constraints.fragment import (
    FREE_TEXT,
    ConstraintError,
    Fragment,
    either,
    repeated,
    sequence,
    text,
    tokens,
    under,
    until,
)
from server.generation.constraints.json_schema import JsonSchema, LooseJson
from server.generation.notices import Notice

FREE = Fragment(FREE_TEXT)
MAX_REQUIRED_CALLS = 32
"""Calls of an answer that is calls and nothing else: small models do not stop before the context does."""
_OPEN = frozenset({"patternProperties", "propertyNames", "minProperties", "allOf", "anyOf", "oneOf", "$ref"})
"""Keywords of an object whose `properties` may not be all that is wanted."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that may be called."""

    name: str
    schema: Mapping[str, Any]
    """The JSON schema of its arguments, as the client gave it."""
    path: str
    """The path of the schema in the client's request."""
    is_strict: bool = False
    """Whether a schema of which something cannot be enforced is to be refused."""
    pattern: str | None = None
    """The expression that all of a custom tool's text fits; the schema has it as well."""
    left_out: list[Notice] = field(default_factory=list, compare=False)
    """The parts of the schema that are not enforced, as far as its grammar has been made."""

    def leave_out(self, path: str, reason: str) -> None:
        """Something of the schema is not enforced. Raises ConstraintError where that is refused."""
        if self.is_strict:
            raise ConstraintError(path, reason)
        self.left_out.append(Notice(path, reason))

    @property
    def object_schema(self) -> Mapping[str, Any]:
        """The schema of the object of all arguments.

        Where the schema names arguments and does not say whether there may be others, there are none: a small model
        would go on inventing them.
        """
        is_list = bool(self.schema.get("properties")) and not self.schema.keys() & _OPEN
        closed = {"additionalProperties": False} if is_list else {}
        return {**closed, **self.schema, "type": "object"}

    def check_root(self) -> None:
        """Arguments are one object, whatever the schema says that they are. Raises ConstraintError if it is strict."""
        kind = self.schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            self.leave_out(under(self.path, "type"), "The arguments of a call are an object.")

    def arguments(self) -> Fragment:
        """All arguments as one object of JSON. Raises ConstraintError for a schema that is refused."""
        return self.json(self.object_schema, self.path)

    def json(self, schema: Any, path: str) -> Fragment:
        """JSON that fits a schema of this tool. Raises ConstraintError for what is refused."""
        if self.is_strict:
            return JsonSchema(schema, path).fragment("")
        loose = LooseJson.read(schema, path)
        self.left_out.extend(loose.notices)
        return loose.fragment("")


class Wanted:
    """The form of an answer with tools, and helpers that write its grammar."""

    def __init__(
        self,
        tools: Sequence[OfferedTool],
        name: str,
        controls: Mapping[str, int],
        *,
        needs_call: bool = False,
        is_parallel: bool = True,
        answer: Fragment | None = None,
        is_thinking: bool = False,
    ) -> None:
        """Describe an answer after the reasoning of ThinkTags, which the caller puts before it.

        Args:
            tools: those that may be called; at least one.
            name: with which all rules begin, a lower-case word.
            controls: the ids of those of the format's markers that are special tokens. All others are plain text.
            needs_call: whether the answer is a call and nothing else.
            is_parallel: whether there may be more than one call.
            is_thinking: whether the prompt has begun the reasoning, of a format that holds it as well.
            answer: the form of an answer without calls; then there is no text around calls. None for any text.
        """
        self.tools = tools
        self.needs_call = needs_call
        self.is_parallel = is_parallel
        self.answer = answer
        self.is_thinking = is_thinking
        self._controls = controls
        self._names: Iterator[str] = (f"{name}_{number}" for number in count())

    def new_name(self) -> str:
        """One that no rule has yet."""
        return next(self._names)

    def rule(self, fragment: Fragment) -> Fragment:
        """The fragment as a rule, which can be used at several places; `unique` leaves it there once."""
        name = self.new_name()
        return Fragment(name, f"{name}: {fragment.start}\n{fragment.rules}")

    def is_control(self, marker: str) -> bool:
        """Whether a marker is a special token."""
        return marker in self._controls

    def text(self, exact: str) -> Fragment:
        """A text of the format, with its markers as tokens if they are special."""
        head, tail = self.split(exact)
        return sequence(*([text(head)] if head or not tail.start else []), *([tail] if tail.start else []))

    def split(self, exact: str) -> tuple[str, Fragment]:
        """A text of the format up to its first special token, and from there on; that may be nothing."""
        controls = "|".join(map(re.escape, self._controls)) or "(?!)"
        head, *rest = re.split(f"({controls})", exact)
        return head, sequence(*(self._part(part) for part in rest if part))

    def _part(self, part: str) -> Fragment:
        return tokens([self._controls[part]]) if part in self._controls else text(part)

    def until(self, end: str, body: str = FREE_TEXT) -> Fragment:
        """A terminal of text, and the text of the format that ends it, where that comes first."""
        head, tail = self.split(end)
        if not tail.start:
            return until(body, head, self.new_name())
        if not head:
            return sequence(Fragment(body), tail)
        terminal = self.new_name().upper()
        return sequence(Fragment(terminal, f"{terminal}: {body} {text(head).start}\n"), tail)

    def several(self, call: Fragment, separator: str = "") -> Fragment:
        """A call, or more of them where that is allowed."""
        if not self.is_parallel:
            return call
        if not separator:
            return repeated(call, at_least=1, at_most=MAX_REQUIRED_CALLS if self.needs_call else None)
        return sequence(call, self.more(sequence(text(separator), call)))

    def more(self, call: Fragment) -> Fragment:
        """Any number of calls after the first, but no more than are allowed."""
        return repeated(call, at_most=MAX_REQUIRED_CALLS - 1 if self.needs_call else None)


def calls_in_text(wanted: Wanted, begins: Mapping[str, Fragment], separator: str | None) -> Fragment:
    """An answer where calls are known by their beginnings.

    Args:
        wanted: the answer.
        begins: what follows each of the beginnings, of which the first is taken where there is no text before it.
        separator: between calls, if each has a beginning of its own; None if several calls stand after one.
    """
    begin, rest = next(iter(begins.items()))
    calls = wanted.rule(sequence(wanted.text(begin), rest))
    if separator is not None:
        calls = wanted.several(calls, separator)
    if wanted.needs_call:
        return unique(calls)
    if wanted.answer is not None:
        return either(wanted.answer, unique(calls))
    found = either(*(sequence(wanted.until(begin), rest) for begin, rest in begins.items()))
    return unique(sequence(repeated(found), FREE) if wanted.is_parallel else either(found, FREE))


def json_objects(wanted: Wanted, key: str = "arguments") -> Fragment:
    """A call as an object of JSON with a name and the arguments under this key."""
    return wanted.rule(
        either(
            *(
                sequence(text(f'{{"name": {json.dumps(tool.name)}, "{key}": '), tool.arguments(), text("}"))
                for tool in wanted.tools
            )
        )
    )


def optional(part: Fragment) -> Fragment:
    """It, or nothing."""
    return Fragment(f"({part.start})?", part.rules)


def unique(fragment: Fragment) -> Fragment:
    """The fragment with every rule only once."""
    return Fragment(fragment.start, "".join(dict.fromkeys(fragment.rules.splitlines(keepends=True))))
