"""JSON as an answer: any object, or what fits a schema."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from server.generation.constraints.check import grammar_error
from server.generation.constraints.fragment import Fragment, whole
from server.generation.constraints.patterns import read_pattern
from server.generation.constraints.schema.reader import read_schema
from server.generation.notices import Notice

_ESCAPES = 'nrbtf\\"'
"""No `\\uXXXX`: spelt so, a name that is declared could come again with a value of any type."""


@dataclass(frozen=True, slots=True)
class Whitespace:
    """What may stand between the tokens of JSON."""

    pattern: str | None
    """An expression in llguidance's dialect, fitted at most once at each place; None for nothing."""


_KEPT = 256
"""Schemas: clients send the same ones again and again."""
BOUNDED = Whitespace(r"[ \t]{1,8}|\r?\n[ \t]{0,32}")
"""A few blanks, or a new line with an indentation. Unbounded, whitespace is what models go on with for ever."""
COMPACT = Whitespace(None)


def read_whitespace(pattern: str, path: str) -> Whitespace:
    """A client's own. Raises ConstraintError for what `patterns` refuses."""
    return Whitespace(read_pattern(pattern, path).rust or None)


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that fits a schema."""

    schema: Any
    path: str
    whitespace: Whitespace = BOUNDED

    def fragment(self, name: str) -> Fragment:
        """Raises ConstraintError if anything in the schema cannot be enforced. Needs no rules."""
        return strict_fragment(json.dumps(self.schema), self.path, self.whitespace)


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any object of JSON."""

    whitespace: Whitespace = BOUNDED

    def fragment(self, name: str) -> Fragment:
        """Never raises, and needs no rules."""
        return json_fragment({"type": "object"}, self.whitespace)


@lru_cache(_KEPT)
def strict_fragment(schema: str, path: str, whitespace: Whitespace) -> Fragment:
    """For the text of a schema, all of it enforced. Raises ConstraintError."""
    return json_fragment(read_schema(json.loads(schema), path).schema, whitespace)


@lru_cache(_KEPT)
def loose_fragment(schema: str, path: str, whitespace: Whitespace) -> tuple[Fragment, tuple[Notice, ...]]:
    """For the text of a schema, enforced as far as possible, and what is not."""
    read = read_schema(json.loads(schema), path, strict=False)
    fragment = json_fragment(read.schema, whitespace)
    error = grammar_error(whole(fragment))
    if error is None:
        return fragment, read.notices
    return json_fragment({}, whitespace), (*read.notices, Notice(path, error))


def json_fragment(schema: Mapping[str, Any], whitespace: Whitespace) -> Fragment:
    """JSON that fits a schema that `read_schema` has written. No whitespace stands before or after it."""
    options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES}
    if whitespace.pattern is None:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = whitespace.pattern
    return Fragment("%json " + json.dumps({"x-guidance": options, **schema}))


@dataclass(frozen=True, slots=True)
class LooseJson:
    """JSON that fits a schema as far as that can be enforced."""

    held: Fragment
    notices: tuple[Notice, ...]
    """What of the schema cannot be."""

    @classmethod
    def read(cls, schema: Any, path: str, whitespace: Whitespace = BOUNDED) -> "LooseJson":
        """Never raises."""
        return cls(*loose_fragment(json.dumps(schema), path, whitespace))

    def fragment(self, name: str) -> Fragment:
        """Needs no rules."""
        return self.held
