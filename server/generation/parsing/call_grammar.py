"""Grammars of answers with calls, in which every call that a model begins is complete."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from server.generation.constraints.closing import CLOSED
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
from server.generation.constraints.json_schema import BOUNDED, JsonSchema
from server.generation.notices import Notice

FREE = Fragment(FREE_TEXT)
MAX_REQUIRED_CALLS = 32
"""Calls of an answer that consists of calls only: small models would not stop before the context is full."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that may be called."""

    name: str
    schema: Mapping[str, Any]
    """The JSON schema of its arguments, as the client sent it."""
    path: str
    """Path of the schema in the client's request."""
    is_strict: bool = False
    """Whether a schema that cannot be fully enforced is refused."""
    pattern: str | None = None
    """Expression for a custom tool's whole text. The schema contains it, too."""
    is_open: bool | None = None
    """Whether objects may have properties that the schema does not name, as in JsonStyle."""
    left_out: list[Notice] = field(default_factory=list, compare=False)
    """Notices of parts of the schema that its grammar does not enforce, or more strictly than it says."""

    def leave_out(self, path: str, reason: str) -> None:
        """Note a part of the schema that is not enforced. Raises ConstraintError if the tool is strict."""
        if self.is_strict:
            raise ConstraintError(path, reason)
        self.left_out.append(Notice(path, reason))

    @property
    def object_schema(self) -> Mapping[str, Any]:
        """The schema of the arguments object.

        A schema without properties has none, because a model would invent some.
        """
        return {"properties": {}, **self.schema, "type": "object"}

    def check_root(self) -> None:
        """Report a schema that is not of an object. Raises ConstraintError if it is strict."""
        kind = self.schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            self.leave_out(under(self.path, "type"), "A call's arguments are always an object.")

    def arguments(self) -> Fragment:
        """All arguments as one JSON object. Raises ConstraintError for a schema that is refused."""
        return self.json(self.object_schema, self.path)

    def json(self, schema: Any, path: str) -> Fragment:
        """JSON that fits a schema of this tool. Raises ConstraintError for a schema that is refused."""
        style = replace(BOUNDED, is_open=self.is_open)
        fragment = JsonSchema(schema, path, style, self.is_strict).fragment("")
        self.report(fragment.notices)
        return fragment

    def report(self, notices: Iterable[Notice]) -> None:
        """Add notices of a part of the schema; that objects are closed, once for the whole schema."""
        for notice in notices:
            if notice.reason == CLOSED:
                self.close()
            else:
                self.left_out.append(notice)

    def close(self) -> None:
        """Report that objects are closed, unless the request says which ones are."""
        notice = Notice(self.path, CLOSED)
        if self.is_open is None and notice not in self.left_out:
            self.left_out.append(notice)


class GrammarBuilder:
    """Requirements on an answer with tools, and helpers that build its grammar."""

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
        """Describe the answer after the reasoning of ThinkTags, whose grammar the caller adds.

        Args:
            tools: the tools that may be called; at least one.
            name: prefix of all rule names, a lower-case word.
            controls: ids of the format's markers that are special tokens. Other markers are plain text.
            needs_call: whether the answer must be a call and nothing else.
            is_parallel: whether more than one call is allowed.
            answer: grammar of an answer without calls; there is then no text around calls. None for any text.
            is_thinking: whether the prompt has opened the reasoning, in a format that includes it.
        """
        self.tools = tools
        self.needs_call = needs_call
        self.is_parallel = is_parallel
        self.answer = answer
        self.is_thinking = is_thinking
        self._controls = controls
        self._names: Iterator[str] = (f"{name}_{number}" for number in count())

    def new_name(self) -> str:
        """An unused rule name."""
        return next(self._names)

    def rule(self, fragment: Fragment) -> Fragment:
        """The fragment as a rule that can be used several times; `unique` removes the copies."""
        name = self.new_name()
        return Fragment(name, f"{name}: {fragment.start}\n{fragment.rules}")

    def is_control(self, marker: str) -> bool:
        """Whether a marker is a special token."""
        return marker in self._controls

    def text(self, exact: str) -> Fragment:
        """A text of the format, with its special tokens as tokens."""
        head, tail = self.split(exact)
        return sequence(*([text(head)] if head or not tail.start else []), *([tail] if tail.start else []))

    def split(self, exact: str) -> tuple[str, Fragment]:
        """A text of the format, split before its first special token; either part may be empty."""
        controls = "|".join(map(re.escape, self._controls)) or "(?!)"
        head, *rest = re.split(f"({controls})", exact)
        return head, sequence(*(self._part(part) for part in rest if part))

    def _part(self, part: str) -> Fragment:
        return tokens([self._controls[part]]) if part in self._controls else text(part)

    def until(self, end: str, body: str = FREE_TEXT) -> Fragment:
        """A terminal, then the text of the format that ends it, at its first occurrence."""
        head, tail = self.split(end)
        if not tail.start:
            return until(body, head, self.new_name())
        if not head:
            return sequence(Fragment(body), tail)
        terminal = self.new_name().upper()
        return sequence(Fragment(terminal, f"{terminal}: {body} {text(head).start}\n"), tail)

    def several(self, call: Fragment, separator: str = "") -> Fragment:
        """One call, or more if that is allowed."""
        if not self.is_parallel:
            return call
        if not separator:
            return repeated(call, at_least=1, at_most=MAX_REQUIRED_CALLS if self.needs_call else None)
        return sequence(call, self.more(sequence(text(separator), call)))

    def more(self, call: Fragment) -> Fragment:
        """Any allowed number of calls after the first."""
        return repeated(call, at_most=MAX_REQUIRED_CALLS - 1 if self.needs_call else None)


def calls_in_text(builder: GrammarBuilder, begins: Mapping[str, Fragment], separator: str | None) -> Fragment:
    """An answer in which each call, or list of calls, has a known beginning.

    Args:
        builder: requirements on the answer.
        begins: beginnings, with the grammar of what follows each. The first is used if no text precedes it.
        separator: between calls that each have a beginning; None if one beginning has several calls.
    """
    begin, rest = next(iter(begins.items()))
    calls = builder.rule(sequence(builder.text(begin), rest))
    if separator is not None:
        calls = builder.several(calls, separator)
    if builder.needs_call:
        return unique(calls)
    if builder.answer is not None:
        return either(builder.answer, unique(calls))
    found = either(*(sequence(builder.until(begin), rest) for begin, rest in begins.items()))
    return unique(sequence(repeated(found), FREE) if builder.is_parallel else either(found, FREE))


def json_objects(builder: GrammarBuilder, key: str = "arguments") -> Fragment:
    """A call as a JSON object with a name and, under `key`, the arguments."""
    return builder.rule(
        either(
            *(
                sequence(text(f'{{"name": {json.dumps(tool.name)}, "{key}": '), tool.arguments(), text("}"))
                for tool in builder.tools
            )
        )
    )


def optional(part: Fragment) -> Fragment:
    """The part or nothing."""
    return Fragment(f"({part.start})?", part.rules)


def unique(fragment: Fragment) -> Fragment:
    """The fragment without repeated rules."""
    return Fragment(fragment.start, "".join(dict.fromkeys(fragment.rules.splitlines(keepends=True))))
