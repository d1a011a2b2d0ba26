"""Structural tags: free text with constrained parts between tags.

Two notations are read. `{"structures": [...], "triggers": [...]}` is used by vLLM and SGLang, but was never part of
OpenAI's API. `{"format": {"type": ...}}` is xgrammar's, which both servers also accept now.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from server.generation.constraints.fragment import (
    FREE_TEXT,
    ConstraintError,
    Fragment,
    check_text,
    either,
    repeated,
    sequence,
    text,
    under,
    until,
)
from server.generation.constraints.json_schema import BOUNDED, JsonSchema, JsonStyle
from server.generation.constraints.lark import Gbnf
from server.generation.constraints.texts import Regex

MAX_TAGS = 500
_MAX_DEPTH = 20
_FREE = Fragment(FREE_TEXT)


@dataclass(frozen=True, slots=True)
class _Position:
    """Position of a format in its structural tag."""

    path: str
    depth: int = 0
    is_last: bool = True
    """Whether nothing follows, so that it may end in free text, which has no end marker."""

    def inner(self, path: str, *, is_last: bool) -> "_Position":
        """The position of a format inside this one."""
        return _Position(path, self.depth + 1, self.is_last and is_last)


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A client's structural tag, in either notation."""

    value: Any
    path: str
    style: JsonStyle = BOUNDED

    def fragment(self, name: str) -> Fragment:
        """The tag as a grammar. Raises ConstraintError for malformed tags and unknown formats."""
        builder = _Builder(name, self.style)
        value = _object(self.value, self.path)
        if "structures" in value:
            return builder.legacy(value, self.path)
        return builder.format(_field(value, "format", self.path), _Position(under(self.path, "format")))


class _Builder:
    """Makes the rules of one structural tag, with unique names."""

    def __init__(self, name: str, style: JsonStyle) -> None:
        self._names: Iterator[str] = (f"{name}_{number}" for number in count())
        self._style = style
        self._tags = 0

    def legacy(self, value: Mapping[str, Any], path: str) -> Fragment:
        """Free text, with a JSON value in each tag that a trigger announces."""
        structures = _list(value, "structures", path)
        tags = []
        for index, structure in enumerate(structures):
            at = under(under(path, "structures"), index)
            given = _object(structure, at)
            content = JsonSchema(_field(given, "schema", at), under(at, "schema"), self._style).fragment(
                next(self._names)
            )
            end = _string(given, "end", at)
            tags.append((_string(given, "begin", at), sequence(content, text(end)), under(at, "begin")))
        return self._triggered(tags, _strings(value, "triggers", path), path)

    def format(self, value: Any, position: _Position) -> Fragment:
        """A format of any type."""
        path = position.path
        given = _object(value, path)
        if position.depth > _MAX_DEPTH:
            raise ConstraintError(path, f"Nesting deeper than {_MAX_DEPTH} levels is not supported.")
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ConstraintError(under(path, "type"), f"Expected one of {', '.join(sorted(_KINDS))}.")
        if kind in _ENDLESS and not position.is_last:
            raise ConstraintError(path, f"'{kind}' is supported only at the end, or '{_ANY}' before a text.")
        return _KINDS[kind](self, given, position)

    def _const_string(self, given: Mapping[str, Any], position: _Position) -> Fragment:
        return text(_string(given, "value", position.path))

    def _json_schema(self, given: Mapping[str, Any], position: _Position) -> Fragment:
        path = position.path
        if given.get("style", "json") != "json":
            raise ConstraintError(under(path, "style"), "Only 'json' is supported.")
        return JsonSchema(_field(given, "json_schema", path), under(path, "json_schema"), self._style).fragment(
            next(self._names)
        )

    def _regex(self, given: Mapping[str, Any], position: _Position) -> Fragment:
        path = position.path
        return Regex(_string(given, "pattern", path), under(path, "pattern")).fragment(next(self._names))

    def _grammar(self, given: Mapping[str, Any], position: _Position) -> Fragment:
        path = position.path
        return Gbnf(_string(given, "grammar", path), under(path, "grammar")).fragment(next(self._names))

    def _any_text(self, given: Mapping[str, Any], position: _Position) -> Fragment:
        _refuse_excludes(given, position.path)
        return _FREE

    def _or(self, given: Mapping[str, Any], position: _Position) -> Fragment:
        at = under(position.path, "elements")
        return either(
            *(
                self.format(element, position.inner(under(at, index), is_last=True))
                for index, element in enumerate(_list(given, "elements", position.path))
            )
        )

    def _sequence(self, given: Mapping[str, Any], position: _Position) -> Fragment:
        """A sequence of formats. Free text before a constant ends at its first occurrence."""
        path = position.path
        elements = _list(given, "elements", path)
        at = under(path, "elements")
        parts: list[Fragment] = []
        index = 0
        while index < len(elements):
            here, following = _object(elements[index], under(at, index)), elements[index + 1 : index + 2]
            if here.get("type") == _ANY and following and _object(following[0], at).get("type") == "const_string":
                _refuse_excludes(here, under(at, index))
                end = _string(following[0], "value", under(at, index + 1))
                parts.append(self._until(FREE_TEXT, end, under(at, index + 1)))
                index += 2
            else:
                is_last = index == len(elements) - 1
                parts.append(self.format(here, position.inner(under(at, index), is_last=is_last)))
                index += 1
        return sequence(*parts)

    def _tag(self, given: Mapping[str, Any], position: _Position) -> Fragment:
        return sequence(text(_string(given, "begin", position.path)), self._inside(given, position))

    def _inside(self, given: Mapping[str, Any], position: _Position) -> Fragment:
        """The rest of a tag after its beginning."""
        path = position.path
        self._tags += 1
        if self._tags > MAX_TAGS:
            raise ConstraintError(path, f"More than {MAX_TAGS} tags are not supported.")
        end = _string(given, "end", path)
        at = under(path, "content")
        content = _object(_field(given, "content", path), at)
        if content.get("type") == _ANY:
            _refuse_excludes(content, at)
            return self._until(FREE_TEXT, end, under(path, "end"))
        if content.get("type") == "regex":
            pattern = Regex(_string(content, "pattern", at), under(at, "pattern"))
            return self._until(pattern.terminal(), end, under(path, "end"))
        return sequence(self.format(content, position.inner(at, is_last=False)), text(end))

    def _until(self, body: str, end: str, path: str) -> Fragment:
        if not end:
            raise ConstraintError(path, "Unconstrained text needs a non-empty end.")
        return until(body, end, next(self._names))

    def _triggered_tags(self, given: Mapping[str, Any], position: _Position) -> Fragment:
        path = position.path
        _refuse_excludes(given, path)
        tags = []
        for index, tag in enumerate(_list(given, "tags", path)):
            at = under(under(path, "tags"), index)
            begin = _string(_object(tag, at), "begin", at)
            tags.append((begin, self._inside(tag, position.inner(at, is_last=False)), under(at, "begin")))
        return self._triggered(
            tags,
            _strings(given, "triggers", path),
            path,
            at_least_one=_flag(given, "at_least_one", path),
            only_one=_flag(given, "stop_after_first", path),
        )

    def _triggered(
        self,
        tags: Sequence[tuple[str, Fragment, str]],
        triggers: Sequence[str],
        path: str,
        *,
        at_least_one: bool = False,
        only_one: bool = False,
    ) -> Fragment:
        """Free text up to a trigger, then the rest of a tag that begins with it, repeatedly, then free text.

        Of triggers with a common beginning, the shortest is found first, and announces all tags that begin with it.
        """
        for index, trigger in enumerate(triggers):
            if not trigger:
                raise ConstraintError(under(under(path, "triggers"), index), "A trigger must not be empty.")
        announced = []
        for begin, inside, at in tags:
            fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not fitting:
                raise ConstraintError(at, "Must start with one of the triggers.")
            trigger = min(fitting, key=len)
            head = until(FREE_TEXT, trigger, next(self._names))
            announced.append(sequence(head, text(begin.removeprefix(trigger)), inside))
        found = either(*announced)
        if only_one:
            return found if at_least_one else either(found, _FREE)
        return sequence(repeated(found, at_least=int(at_least_one)), _FREE)

    def _tags_with_separator(self, given: Mapping[str, Any], position: _Position) -> Fragment:
        path = position.path
        at = under(path, "tags")
        tags = [
            self._tag(_object(tag, under(at, index)), position.inner(under(at, index), is_last=False))
            for index, tag in enumerate(_list(given, "tags", path))
        ]
        one = either(*tags)
        several = one
        if not _flag(given, "stop_after_first", path):
            several = sequence(one, repeated(sequence(text(_string(given, "separator", path)), either(*tags))))
            several = replace(one, start=several.start)
        return several if _flag(given, "at_least_one", path) else replace(several, start=f"({several.start})?")


_ANY = "any_text"
_ENDLESS = frozenset({_ANY, "triggered_tags"})
_KINDS: Mapping[str, Callable[[_Builder, Mapping[str, Any], _Position], Fragment]] = {
    "const_string": _Builder._const_string,
    "json_schema": _Builder._json_schema,
    "regex": _Builder._regex,
    "grammar": _Builder._grammar,
    _ANY: _Builder._any_text,
    "or": _Builder._or,
    "sequence": _Builder._sequence,
    "tag": _Builder._tag,
    "triggered_tags": _Builder._triggered_tags,
    "tags_with_separator": _Builder._tags_with_separator,
}


def _object(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConstraintError(path, "Expected an object.")
    return value


def _field(given: Mapping[str, Any], name: str, path: str) -> Any:
    if name not in given:
        raise ConstraintError(under(path, name), "Missing.")
    return given[name]


def _string(given: Mapping[str, Any], name: str, path: str) -> str:
    value = _field(given, name, path)
    if not isinstance(value, str):
        raise ConstraintError(under(path, name), "Expected a string.")
    check_text(value, under(path, name))
    return value


def _list(given: Mapping[str, Any], name: str, path: str) -> list[Any]:
    value = _field(given, name, path)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TAGS:
        raise ConstraintError(under(path, name), f"Expected a list of 1 to {MAX_TAGS} items.")
    return value


def _strings(given: Mapping[str, Any], name: str, path: str) -> list[str]:
    values = _list(given, name, path)
    return [_string({name: value}, name, path) for value in values]


def _flag(given: Mapping[str, Any], name: str, path: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise ConstraintError(under(path, name), "Expected a boolean.")
    return value


def _refuse_excludes(given: Mapping[str, Any], path: str) -> None:
    if given.get("excludes"):
        raise ConstraintError(under(path, "excludes"), "Not supported.")
