"""Grammars that clients write: Lark in llguidance's dialect, and GBNF."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from llguidance.gbnf_to_lark import gbnf_to_lark

from server.generation.constraints.check import check_grammar
from server.generation.constraints.errors import ConstraintError, check_text
from server.generation.constraints.fragment import Fragment, whole
from server.generation.constraints.json_text import BOUNDED, JsonSchema, Whitespace
from server.generation.constraints.patterns import MAX_EXPANDED

MAX_CHARACTERS = 200_000
_MAX_NESTING = 60
_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|(?:\#|//)[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<special><[^<>\s]+>)
    |(?P<directive>%[a-z]+)
    |(?P<reference>@\w+)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<count>\{\s*\d*\s*(?:,\s*\d*\s*)?\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
    |(?P<newline>\n)
    |(?P<other>.)""",
    re.VERBOSE,
)
_ALLOWED_DIRECTIVES = ("%ignore", "%import", "%if", "%json", "%regex", "%llguidance")
_REFUSED_ATTRIBUTES = frozenset({"max_tokens", "temperature", "stop", "stop_capture"})
_NUMBER = re.compile(r"\d+")
_UNIT = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_NAMED_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\", "[": "\\[", "]": "\\]"}


@dataclass(frozen=True, slots=True)
class Lark:
    """Text that a grammar in llguidance's dialect of Lark fits; JSON schemas in it are read as everywhere."""

    grammar: str
    path: str
    whitespace: Whitespace = BOUNDED

    def fragment(self, name: str) -> Fragment:
        """A rule called `name` around the whole grammar, whose names and `%ignore` are its own.

        Raises ConstraintError for what does not compile, for special tokens, which are the server's to name, for
        attributes that depend on more than the text or take text back, and for what could break out of the rule.
        """
        check_text(self.grammar, self.path)
        if len(self.grammar) > MAX_CHARACTERS:
            raise ConstraintError(self.path, f"Grammars of more than {MAX_CHARACTERS} characters are not supported.")
        body = _Checker(self).checked()
        fragment = Fragment(name, f"{name}: %lark {{\n{body}\n}}\n")
        check_grammar(whole(fragment), self.path)
        return fragment


@dataclass(frozen=True, slots=True)
class Gbnf:
    """Text that a grammar of llama.cpp fits."""

    grammar: str
    path: str

    def fragment(self, name: str) -> Fragment:
        """Raises ConstraintError for what is no such grammar or does not compile."""
        if len(self.grammar) > MAX_CHARACTERS:
            raise ConstraintError(self.path, f"Grammars of more than {MAX_CHARACTERS} characters are not supported.")
        if _nesting(self.grammar) > _MAX_NESTING:
            raise ConstraintError(self.path, f"Parentheses nested more than {_MAX_NESTING} deep are not supported.")
        try:
            converted = gbnf_to_lark(_GBNF_ESCAPE.sub(_spell_escape, self.grammar))
        except Exception as error:  # the converter raises Exception itself, IndexError and others
            raise ConstraintError(self.path, f"Not a grammar in GBNF: {error}") from error
        return Lark(converted, self.path).fragment(name)


def _nesting(grammar: str) -> int:
    deepest = depth = 0
    for character in grammar:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def _spell_escape(escape: re.Match[str]) -> str:
    """A character by its number as itself: the converter and Lark have other escapes than GBNF."""
    digits = next((group for group in escape.groups() if group), None)
    if digits is None or int(digits, 16) > 0x10FFFF:
        return escape[0]
    character = chr(int(digits, 16))
    if character in _NAMED_ESCAPES:
        return _NAMED_ESCAPES[character]
    return character if character.isprintable() and character not in "-^" else escape[0]


class _Checker:
    """Reads a client's grammar token by token and writes it again."""

    def __init__(self, grammar: Lark) -> None:
        self._grammar = grammar
        self._text = grammar.grammar
        self._terminals: dict[str, list[tuple[str, str]]] = {}
        """The right sides of terminals, and of rules that llguidance makes terminals."""
        self._sizes: dict[str, int] = {}
        self._open: list[tuple[str, str]] = []
        """The right side that the next line may go on with."""

    def checked(self) -> str:
        """Raises ConstraintError for what is not a client's to say."""
        written: list[str] = []
        line: list[tuple[str, str]] = []
        braces = 0
        for kind, token in self._tokens():
            written.append(self._allowed(kind, token))
            braces += (token == "{") - (token == "}")
            if braces < 0:
                raise self._error("There is a '}' without a '{'.")
            if kind == "newline":
                self._collect(line)
                line = []
            elif kind != "skip":
                line.append((kind, token))
        self._collect(line)
        if braces:
            raise self._error("There is a '{' without a '}'.")
        for name in self._terminals:
            self._size_of(name, ())
        return "".join(written)

    def _error(self, reason: str) -> ConstraintError:
        return ConstraintError(self._grammar.path, reason)

    def _tokens(self) -> Iterator[tuple[str, str]]:
        at = 0
        while at < len(self._text):
            found = _TOKEN.match(self._text, at)
            if found is None or found.lastgroup is None:
                raise self._error(f"Not a grammar near character {at}.")
            at = found.end()
            if found.lastgroup == "directive" and found[0] in {"%json", "%regex", "%llguidance"}:
                value, end = self._json(at)
                yield found[0], value
                at = end
            else:
                yield found.lastgroup, found[0]

    def _json(self, at: int) -> tuple[str, int]:
        """The text of a value of JSON, and where it ends."""
        at += len(self._text[at:]) - len(self._text[at:].lstrip())
        try:
            _, end = json.JSONDecoder().raw_decode(self._text, at)
        except (ValueError, RecursionError) as error:
            raise self._error(f"Expected JSON near character {at}.") from error
        return self._text[at:end], end

    def _allowed(self, kind: str, token: str) -> str:
        """The token, as it may stand in the server's own grammar."""
        if kind == "special":
            raise self._error(f"Special tokens ({token}) are not supported.")
        if kind == "reference":
            raise self._error(f"There is no other grammar to refer to ({token}).")
        if kind == "directive" and token not in _ALLOWED_DIRECTIVES:
            raise self._error(f"'{token}' is not supported.")
        if kind == "regex":
            self._check_size(_regex_size(token))
        if kind == "%json":
            schema = JsonSchema(json.loads(token), f"{self._grammar.path}.%json", self._grammar.whitespace)
            return schema.fragment("json").start
        if kind == "%llguidance":
            if token != "{}":
                raise self._error("'%llguidance' is not supported with options.")
            return ""
        return f"%regex {token}" if kind == "%regex" else token

    def _collect(self, line: list[tuple[str, str]]) -> None:
        """Notes the definition of a terminal. One may go on in the next line, with a '|'."""
        if not line:
            return
        (kind, name), rest = line[0], line[1:]
        if name == "|":
            self._open += line
            return
        colon = rest.index(("other", ":")) if ("other", ":") in rest else len(rest)
        self._open = rest[colon + 1 :]
        has_attributes = ("other", "[") in rest[:colon]
        for _, attribute in rest[:colon]:
            if has_attributes and attribute in _REFUSED_ATTRIBUTES:
                raise self._error(f"The attribute '{attribute}' is not supported.")
        if kind == "name" and (name.isupper() or has_attributes):
            self._terminals[name] = self._open

    def _check_size(self, size: int) -> None:
        if size > MAX_EXPANDED:
            reason = f"A terminal has more than {MAX_EXPANDED} characters when its counts are written out."
            raise self._error(reason)

    def _size_of(self, name: str, above: tuple[str, ...]) -> int:
        """How many characters a terminal has, with all its counts and names written out."""
        if name in above or len(above) > _MAX_NESTING:
            raise self._error(f"Terminal '{name}' refers to itself, or too deeply to others.")
        if name not in self._sizes:
            stack, last = [0], 0
            for kind, token in self._terminals[name]:
                if token in {"(", "["}:
                    stack.append(0)
                    last = 0
                elif token in {")", "]"} and len(stack) > 1:
                    last = stack.pop()
                    stack[-1] += last
                elif kind == "count":
                    stack[-1] += last * (max(map(int, _NUMBER.findall(token)), default=1) - 1)
                else:
                    last = self._token_size(kind, token, (*above, name))
                    stack[-1] += last
                self._check_size(sum(stack))
            self._sizes[name] = sum(stack)
        return self._sizes[name]

    def _token_size(self, kind: str, token: str, above: tuple[str, ...]) -> int:
        if kind == "name" and token in self._terminals:
            return self._size_of(token, above)
        return _regex_size(token) if kind == "regex" else len(token) if kind in {"string", "%regex"} else 0


def _regex_size(regex: str) -> int:
    """How many characters and classes an expression of Rust has, with all its counts written out, at most."""
    stack, last = [0], 0
    for unit in _UNIT.finditer(regex):
        if unit[0] == "(":
            stack.append(0)
            last = 0
        elif unit[0] == ")" and len(stack) > 1:
            last = stack.pop()
            stack[-1] += last
        elif unit[1] is not None:
            stack[-1] += last * (max(int(unit[1][:9]), int((unit[2] or "0")[:9])) - 1)
        else:
            last = 1
            stack[-1] += 1
    return sum(stack)
