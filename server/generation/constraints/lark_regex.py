"""Grammars in Lark whose rules do not refer to themselves, as one regular expression.

Where a text stands in a string of JSON, an expression can be enforced and a grammar cannot.
"""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType

from server.generation.constraints.errors import ConstraintError

_MAX_CHARACTERS = 100_000
"""Of the expression: names are written out, so that it may be much larger than the grammar."""
_MAX_DEPTH = 50
_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|(?:\#|//)[^\n]*|\n\s*(?=\|))
    |(?P<newline>\n)
    |(?P<import>%import[ \t]+common[ \t]*\.[ \t]*(?P<imported>\w+)[ \t]*(?=\n|$))
    |(?P<alias>->[ \t]*\w+)
    |(?P<string>"(?:\\.|[^"\\\n])*"(?![i.]))
    |(?P<regex>/(?:\\.|[^/\\\n])+/(?![imslux]))
    |(?P<name>[A-Za-z_]\w*)
    |(?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\}|~\s*\d+(?:\s*\.\.\s*\d+)?|[*+?](?![*+?]))
    |(?P<sign>[:|()\[\]])""",
    re.VERBOSE,
)
_ANY_CHARACTER = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\.", re.DOTALL)
_NUMBER = re.compile(r"\d+")
_COMMON: Mapping[str, str] = MappingProxyType(
    {
        "LF": r"\n",
        "CR": r"\r",
        "NEWLINE": r"(?:\r?\n)+",
        "WS": r"[ \t\f\r\n]+",
        "WS_INLINE": r"[ \t]+",
        "DIGIT": "[0-9]",
        "HEXDIGIT": "[a-fA-F0-9]",
        "INT": "[0-9]+",
        "LETTER": "[a-zA-Z]",
        "WORD": "[a-zA-Z]+",
        "CNAME": "[a-zA-Z_][a-zA-Z_0-9]*",
    }
)
"""Of the terminals that every grammar may import."""


def regex_of_lark(grammar: str, path: str) -> str:
    """An expression that fits what the grammar's `start` does, as a whole.

    Raises ConstraintError for a grammar that is none, refers to itself, is too large, or uses what is not known here.
    """
    return _Grammar(grammar, path).expression("start", ())


class _Grammar:
    """The right sides of its rules and terminals, as they are written and as expressions."""

    def __init__(self, text: str, path: str) -> None:
        self._path = path
        self._written: dict[str, list[tuple[str, str]]] = {}
        self._expressions: dict[str, str] = {}
        line: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise self._error(f"Not understood near character {at}.")
            at = found.end()
            if found["imported"] is not None:
                self._expressions[found["imported"]] = self._common(found["imported"])
            elif found["newline"] is not None:
                self._define(line)
                line = []
            elif found["skip"] is None and found["alias"] is None:
                line.append((found.lastgroup, found[0]))
        self._define(line)

    def expression(self, name: str, above: tuple[str, ...]) -> str:
        """Of a rule or terminal, for use in those above it."""
        if name in above:
            raise self._error(f"'{name}' refers to itself.")
        if name not in self._expressions:
            if name not in self._written:
                raise self._error(f"There is no '{name}'.")
            tokens = self._written[name]
            found, end = self._alternatives(tokens, 0, (*above, name))
            if end < len(tokens):
                raise self._error(f"'{tokens[end][1]}' is not expected in '{name}'.")
            self._expressions[name] = found
        return self._expressions[name]

    def _error(self, reason: str) -> ConstraintError:
        return ConstraintError(self._path, reason)

    def _common(self, name: str) -> str:
        if name not in _COMMON:
            raise self._error(f"'common.{name}' is not known.")
        return _COMMON[name]

    def _define(self, line: list[tuple[str, str]]) -> None:
        if not line:
            return
        if len(line) < 2 or line[0][0] != "name" or line[1][1] != ":":
            raise self._error(f"'{line[0][1]}' does not begin a rule.")
        self._written[line[0][1]] = line[2:]

    def _alternatives(self, tokens: list[tuple[str, str]], at: int, above: tuple[str, ...]) -> tuple[str, int]:
        """An expression of what stands there, and where that ends; `above` has the names and brackets around it."""
        if len(above) > _MAX_DEPTH:
            raise self._error(f"Nested more than {_MAX_DEPTH} deep.")
        written = ""
        while at < len(tokens) and tokens[at][1] not in (")", "]"):
            kind, token = tokens[at]
            at += 1
            if token == "|":
                written += "|"
                continue
            if token in ("(", "["):
                inner, at = self._alternatives(tokens, at, (*above, token))
                if tokens[at : at + 1] != [("sign", ")" if token == "(" else "]")]:
                    raise self._error(f"There is a '{token}' without its end.")
                part, at = f"(?:{inner}){'?' if token == '[' else ''}", at + 1
            else:
                part = self._atom(kind, token, above)
            if tokens[at : at + 1] and tokens[at][0] == "count":
                part, at = f"(?:{part}){_quantifier(tokens[at][1])}", at + 1
            written += part
            if len(written) > _MAX_CHARACTERS:
                raise self._error(f"More than {_MAX_CHARACTERS} characters with all names written out.")
        return written, at

    def _atom(self, kind: str, token: str, above: tuple[str, ...]) -> str:
        if kind == "string":
            return re.escape(self._string(token))
        if kind == "regex":
            return f"(?:{_ANY_CHARACTER.sub(_but_line_end, token[1:-1].replace(chr(92) + '/', '/'))})"
        if kind == "name":
            return f"(?:{self.expression(token, above)})"
        raise self._error(f"'{token}' is not expected.")

    def _string(self, token: str) -> str:
        try:
            text: str = json.loads(token)
        except ValueError:
            raise self._error(f"{token} is no string.") from None
        return text


def _quantifier(count: str) -> str:
    """Lark's `~2..5` as `{2,5}`; all else is written as in expressions."""
    return "{" + ",".join(_NUMBER.findall(count)) + "}" if count.startswith("~") else "".join(count.split())


def _but_line_end(unit: re.Match[str]) -> str:
    """A dot is anything but a line feed; a carriage return, too, which it is not in `patterns`."""
    return r"[^\n]" if unit[0] == "." else unit[0]
