"""Grammars that clients write: Lark in llguidance's dialect, and GBNF.

Inside a JSON string only a regular expression can be enforced. So a Lark grammar whose rules do not refer to themselves
can be converted to one.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llguidance.gbnf_to_lark import gbnf_to_lark

from server.generation.constraints.check import check_grammar
from server.generation.constraints.fragment import ConstraintError, Fragment, check_text, whole
from server.generation.constraints.json_schema import BOUNDED, JsonSchema, JsonStyle
from server.generation.constraints.texts import MAX_EXPANDED, regex_size
from server.generation.notices import Notice

MAX_CHARACTERS = 200_000
_MAX_WRITTEN = 1_000_000
"""Limit on the characters of expressions. Names are expanded, so these can be much larger than the grammar."""
_MAX_DEPTH = 50
_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|(?:\#|//)[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*+"i?)
    |(?P<regex>/(?:\\.|[^/\\])++/[imslux]*)
    |(?P<unended>["/])
    |(?P<special><[^<>\s]+>)
    |(?P<alias>->[ \t]*\w+)
    |(?P<directive>%[a-z]+)
    |(?P<reference>@\w+)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<count>\{\s*+(?:\d++\s*+)?(?:,\s*+(?:\d++\s*+)?)?\}|~\s*+\d++(?:\s*+\.\.\s*+\d++)?|[*+?])
    |(?P<newline>\n)
    |(?P<other>.)""",
    re.VERBOSE,
)
_ALLOWED_DIRECTIVES = ("%ignore", "%import", "%if", "%json", "%regex", "%llguidance")
_REFUSED_ATTRIBUTES = frozenset({"max_tokens", "temperature", "stop", "stop_capture"})
_NO_LIMIT = (
    "`max_tokens` of a rule is ignored, because tokens do not count in a grammar. Use the request's `max_tokens`."
)
_HEADER = re.compile(r"^(?P<name>[ \t]*[A-Za-z_][\w-]*[ \t]*)\[(?P<attributes>[^\]\n]*)\](?=[ \t]*:)", re.MULTILINE)
_OPTIONS: tuple[object, ...] = ({}, {"no_forcing": True})
"""Options of a grammar that say no more than the server's own."""
_NUMBER = re.compile(r"\d+")
_ANY_CHARACTER = re.compile(r"\\.|\[(?:\\.|[^\]\\])*+(?:\]|\Z)|\.", re.DOTALL)
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
"""Expressions of the terminals in the `common` module, which every grammar may import."""
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_NAMED_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\", "[": "\\[", "]": "\\]"}
_Token = tuple[str, str]
"""Kind and text of a token."""


@dataclass(frozen=True, slots=True)
class Lark:
    """Text that matches a grammar in llguidance's dialect of Lark. Its JSON schemas are read by `json_schema`."""

    grammar: str
    path: str
    style: JsonStyle = BOUNDED

    def fragment(self, name: str) -> Fragment:
        """A rule called `name` around the whole grammar, which keeps its own names and `%ignore`.

        Raises ConstraintError for a grammar that does not compile or could break out of the rule. Special tokens are
        refused, and so are attributes that depend on more than the text, except `max_tokens`, which is reported.
        """
        grammar = _Grammar(self.grammar, self.path, self.style)
        fragment = Fragment(name, f"{name}: %lark {{\n{grammar.checked()}\n}}\n", tuple(grammar.notices))
        check_grammar(whole(fragment), self.path)
        return fragment


@dataclass(frozen=True, slots=True)
class Gbnf:
    """Text that matches a grammar in llama.cpp's format."""

    grammar: str
    path: str

    def fragment(self, name: str) -> Fragment:
        """The grammar as a Lark rule. Raises ConstraintError if it is not valid GBNF or does not compile."""
        if len(self.grammar) > MAX_CHARACTERS:
            raise ConstraintError(self.path, f"Grammars of more than {MAX_CHARACTERS} characters are not supported.")
        if _nesting(self.grammar) > _MAX_DEPTH:
            raise ConstraintError(self.path, f"Parentheses nested more than {_MAX_DEPTH} deep are not supported.")
        try:
            converted = gbnf_to_lark(_GBNF_ESCAPE.sub(_spell_escape, self.grammar))
        except Exception as error:  # the converter raises Exception itself, IndexError and others
            raise ConstraintError(self.path, f"Not a valid GBNF grammar: {error}") from error
        return Lark(converted, self.path).fragment(name)


def regex_of_lark(grammar: str, path: str) -> str:
    """A regular expression for the whole text that the grammar's `start` matches.

    Raises ConstraintError for a grammar that is invalid, recursive, too large, or uses unsupported features.
    """
    return _Grammar(grammar, path, exact=True).expression("start", ())


def _nesting(grammar: str) -> int:
    deepest = depth = 0
    for character in grammar:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def _spell_escape(escape: re.Match[str]) -> str:
    """A numeric escape as the character itself, because the converter and Lark have other escapes than GBNF."""
    digits = next((group for group in escape.groups() if group), None)
    if digits is None or int(digits, 16) > 0x10FFFF:
        return escape[0]
    character = chr(int(digits, 16))
    if character in _NAMED_ESCAPES:
        return _NAMED_ESCAPES[character]
    return character if character.isprintable() and character not in "-^" else escape[0]


class _Grammar:
    """A client's grammar, read token by token."""

    def __init__(self, text: str, path: str, style: JsonStyle = BOUNDED, *, exact: bool = False) -> None:
        """Raises ConstraintError for a token that clients may not use.

        Without `exact`, expressions only serve to estimate the size of terminals: parts that are not expressions are
        ignored.
        """
        check_text(text, path)
        self._text = text if exact else _HEADER.sub(_without_limit, text)
        self._path = path
        self._style = style
        self._exact = exact
        self._right_sides: dict[str, list[_Token]] = {}
        self._terminals: set[str] = set()
        """Names of terminals, and of rules that llguidance treats as terminals."""
        self._expressions: dict[str, str] = {}
        self._spent = 0
        self.notices = [Notice(path, _NO_LIMIT)] if self._text != text else []
        """Notices of what is not enforced."""
        if len(text) > MAX_CHARACTERS:
            raise self._error(f"Grammars of more than {MAX_CHARACTERS} characters are not supported.")
        tokens = list(self._tokens())
        self._written = "".join(self._allowed(kind, token) for kind, token in tokens)
        self._define([token for token in tokens if token[0] not in {"skip", "alias"}])

    def checked(self) -> str:
        """The grammar for use within the server's own. Raises ConstraintError for terminals that are too large."""
        for name in self._terminals:
            if regex_size(self.expression(name, ())) > MAX_EXPANDED:
                reason = f"A terminal has more than {MAX_EXPANDED} characters with its counts expanded."
                raise self._error(reason)
        return self._written

    def expression(self, name: str, above: tuple[str, ...]) -> str:
        """The expression of a rule or terminal. `above` has the names that are being expanded."""
        if name in above:
            raise self._error(f"'{name}' refers to itself.")
        if name not in self._expressions:
            if not self._exact and name not in self._terminals:
                return ""
            if name not in self._right_sides:
                raise self._error(f"'{name}' is not defined.")
            tokens = self._right_sides[name]
            found, end = self._alternatives(tokens, 0, (*above, name))
            if end < len(tokens):
                raise self._error(f"Unexpected '{tokens[end][1]}' in '{name}'.")
            self._expressions[name] = found
        return self._expressions[name]

    def _error(self, reason: str) -> ConstraintError:
        return ConstraintError(self._path, reason)

    def _tokens(self) -> Iterator[_Token]:
        at = 0
        while at < len(self._text):
            found = _TOKEN.match(self._text, at)
            if found is None or found.lastgroup is None:
                raise self._error(f"Not a valid grammar near character {at}.")
            if found.lastgroup == "unended":
                raise self._error(f"The '{found[0]}' near character {at} has no end.")
            at = found.end()
            if found.lastgroup == "directive" and found[0] in {"%json", "%regex", "%llguidance"}:
                value, end = self._json(at)
                yield found[0], value
                at = end
            else:
                yield found.lastgroup, found[0]

    def _json(self, at: int) -> tuple[str, int]:
        """The text of a JSON value, and where it ends."""
        at += len(self._text[at:]) - len(self._text[at:].lstrip())
        try:
            _, end = json.JSONDecoder().raw_decode(self._text, at)
        except (ValueError, RecursionError) as error:
            raise self._error(f"Expected JSON near character {at}.") from error
        return self._text[at:end], end

    def _allowed(self, kind: str, token: str) -> str:
        """The token as it is written into the server's own grammar."""
        if kind == "special":
            raise self._error(f"Special tokens ({token}) are not supported.")
        if kind == "reference":
            raise self._error(f"References to other grammars ({token}) are not supported.")
        if kind == "directive" and token not in _ALLOWED_DIRECTIVES:
            raise self._error(f"'{token}' is not supported.")
        if kind == "regex" and regex_size(token) > MAX_EXPANDED:
            raise self._error(f"{token[:20]} has more than {MAX_EXPANDED} characters with its counts expanded.")
        if kind == "%json":
            fragment = JsonSchema(json.loads(token), f"{self._path}.%json", self._style).fragment("json")
            self.notices += fragment.notices
            return fragment.start
        if kind == "%llguidance":
            if json.loads(token) not in _OPTIONS:
                raise self._error("'%llguidance' is not supported with options.")
            return ""
        return f"%regex {token}" if kind == "%regex" else token

    def _define(self, tokens: list[_Token]) -> None:
        """Record the definitions. A line that begins with '|' continues the previous one."""
        depth = 0
        for _, token in tokens:
            depth += (token == "{") - (token == "}")
            if depth < 0:
                raise self._error("There is a '}' without a '{'.")
        if depth:
            raise self._error("There is a '{' without a '}'.")
        line: list[_Token] = []
        last: list[_Token] = []
        for kind, token in [*tokens, ("newline", "\n")]:
            if kind != "newline":
                line.append((kind, token))
            elif line:
                last = self._define_line(line, last)
                line = []

    def _define_line(self, line: list[_Token], last: list[_Token]) -> list[_Token]:
        """Record the definition in a line. Returns the right side that the next line may continue."""
        (kind, name), rest = line[0], line[1:]
        if name == "|":
            last += line
            return last
        if line[:3] == [("directive", "%import"), ("name", "common"), ("other", ".")] and len(line) == 4:
            self._expressions.update({one: _COMMON[one] for _, one in line[3:] if one in _COMMON})
            return []
        colon = rest.index(("other", ":")) if ("other", ":") in rest else len(rest)
        right_side = rest[colon + 1 :]
        has_attributes = ("other", "[") in rest[:colon]
        for _, attribute in rest[:colon]:
            if has_attributes and attribute in _REFUSED_ATTRIBUTES:
                raise self._error(f"The attribute '{attribute}' is not supported.")
        if self._exact and (kind != "name" or colon > 0):
            raise self._error(f"Expected a rule, but got '{name}'.")
        if kind == "name" and colon < len(rest):
            self._right_sides[name] = right_side
            if name.isupper() or has_attributes:
                self._terminals.add(name)
        return right_side

    def _alternatives(self, tokens: list[_Token], at: int, above: tuple[str, ...]) -> tuple[str, int]:
        """The expression that starts at a token, and its end. `above` has the names and brackets around it."""
        if len(above) > _MAX_DEPTH:
            raise self._error(f"Nesting deeper than {_MAX_DEPTH} levels is not supported.")
        written: list[str] = []
        while at < len(tokens) and tokens[at][1] not in (")", "]"):
            kind, token = tokens[at]
            at += 1
            if token in ("(", "["):
                inner, at = self._alternatives(tokens, at, (*above, token))
                if tokens[at : at + 1] != [("other", ")" if token == "(" else "]")]:
                    raise self._error(f"There is a '{token}' without its closing bracket.")
                part, at = f"(?:{inner}){'?' if token == '[' else ''}", at + 1
            else:
                part = "|" if token == "|" else self._atom(kind, token, above)
            if tokens[at : at + 1] and tokens[at][0] == "count" and token != "|":
                part, at = f"(?:{part}){_quantifier(tokens[at][1])}", at + 1
            written.append(part)
            self._spent += len(part)
            if self._spent > _MAX_WRITTEN:
                raise self._error(f"More than {_MAX_WRITTEN} characters with all names expanded.")
        return "".join(written), at

    def _atom(self, kind: str, token: str, above: tuple[str, ...]) -> str:
        if kind == "string" and not (self._exact and token.endswith("i")):
            return re.escape(self._string(token.removesuffix("i")))
        if kind == "regex" and not (self._exact and token[-1] != "/"):
            inner = token[1 : token.rindex("/")].replace("\\/", "/")
            return f"(?:{_ANY_CHARACTER.sub(_but_line_end, inner)})"
        if kind == "name":
            return f"(?:{self.expression(token, above)})"
        if self._exact:
            raise self._error(f"Unexpected '{token}'.")
        return token if kind == "%regex" else ""

    def _string(self, token: str) -> str:
        try:
            text: str = json.loads(token)
        except ValueError:
            if not self._exact:
                return token
            raise self._error(f"{token} is not a valid string.") from None
        return text


def _without_limit(header: re.Match[str]) -> str:
    """The name and attributes of a rule without the attribute `max_tokens`."""
    kept = [one for one in header["attributes"].split(",") if one.partition("=")[0].strip() != "max_tokens"]
    return header["name"] + (f"[{','.join(kept)}]" if kept else "")


def _quantifier(count: str) -> str:
    """A Lark count as a regular expression's: `~2..5` as `{2,5}`, and `{,5}` as `{0,5}`."""
    if count.startswith("{"):
        return "".join(count.split()).replace("{,", "{0,").replace("{}", "{1}")
    return "{" + ",".join(_NUMBER.findall(count)) + "}" if count.startswith("~") else count


def _but_line_end(unit: re.Match[str]) -> str:
    """A dot as Lark means it: any character but a line feed. In ECMAScript, it excludes carriage returns, too."""
    return r"[^\n]" if unit[0] == "." else unit[0]
