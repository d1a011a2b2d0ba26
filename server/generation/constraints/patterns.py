r"""Regular expressions of clients, read as ECMAScript's and written again for llguidance.

`\d`, `\w` and `\b` mean ASCII there, `.` no end of a line, and `&&` in a class two characters: Rust's expressions,
which llguidance takes, mean other things. So everything is spelt out, and what it cannot do is refused by its name.
"""

import re
from dataclasses import dataclass

from server.generation.constraints.errors import ConstraintError, check_text

MAX_EXPANDED = 10_000
"""Characters and classes of a pattern with all its counts written out: `(x{100}){100}` has 10,000."""
UNWRITABLE = frozenset({*range(0x20), 0x7F} - {*b"\b\t\n\f\r"})
"""Characters that strings of JSON have only as `\\uXXXX`, which is not allowed here."""
_MAX_DEPTH = 50
_DIGITS = "0-9"
_WORD = "0-9A-Za-z_"
_SPACE = r"\t-\r \x{a0}\x{feff}\x{2028}\x{2029}\p{Zs}"
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_ANY_BUT_LINE_ENDS = r"[^\n\r\x{2028}\x{2029}]"
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_COUNT = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_LONGEST_COUNT = len("{100000,100000}")
_GROUP_NAME = re.compile(r"\?P?<[A-Za-z_]\w*>")
_PROPERTY = re.compile(r"\{[A-Za-z_]+(=[A-Za-z_]+)?\}")
_HEX = {"x": re.compile(r"([0-9A-Fa-f]{2})"), "u": re.compile(r"([0-9A-Fa-f]{4})|\{([0-9A-Fa-f]{1,6})\}")}
_REFUSED_GROUPS = {
    "?=": "lookahead",
    "?!": "lookahead",
    "?<=": "lookbehind",
    "?<!": "lookbehind",
}


@dataclass(frozen=True, slots=True)
class Pattern:
    """An expression as llguidance takes it."""

    rust: str
    size: int
    """With all counts written out."""


def read_pattern(pattern: str, path: str) -> Pattern:
    """One for a string of JSON. It fits any part of it, unless its anchors say otherwise.

    Raises ConstraintError for what is no expression, what llguidance has nothing for, and what is too large.
    """
    check_text(pattern, path)
    return _Reader(pattern, path, in_json=True).read()


def read_terminal(pattern: str, path: str) -> str:
    """A terminal of Lark that fits what the pattern fits as a whole, with and without anchors.

    Raises ConstraintError as `read_pattern` does.
    """
    check_text(pattern, path)
    rust = _Reader(pattern, path, in_json=False).read().rust
    return f"/{rust}/" if rust else '""'


class _Reader:
    """A position in a pattern. Each method reads what it is named after and returns it in Rust's syntax."""

    def __init__(self, pattern: str, path: str, *, in_json: bool) -> None:
        self._text = pattern
        self._path = path
        self._in_json = in_json
        self._at = 0
        self._depth = 0
        self._begins = True
        """Nothing of the text has been fitted on the way here, so that a '^' may stand here."""
        self._ended = False
        """There was a '$' on the way here, so that nothing may follow."""
        self._opened = 0
        """How many '^' were read."""

    def read(self) -> Pattern:
        rust, size = self._alternatives()
        if self._at < len(self._text):
            raise self._error("has a ')' without a '('")
        return Pattern(rust, size)

    def _alternatives(self) -> tuple[str, int]:
        begins, ended = self._begins, False
        parts = [self._sequence()]
        while self._take("|"):
            ended |= self._ended
            self._begins, self._ended = begins, False
            parts.append(self._sequence())
        self._ended |= ended
        return "|".join(rust for rust, _ in parts), self._checked(sum(size for _, size in parts))

    def _sequence(self) -> tuple[str, int]:
        parts: list[str] = []
        total = 0
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            rust, size = self._quantified()
            parts.append(rust)
            total += size
        return "".join(parts), self._checked(total)

    def _quantified(self) -> tuple[str, int]:
        if self._text[self._at] in "^$":
            return self._anchor(), 0
        if self._text[self._at] in "*+?" or _COUNT.match(self._text, self._at):
            raise self._error("repeats nothing")
        if self._ended:
            raise self._error("goes on after its end ('$')")
        opened = self._opened
        rust, size = self._atom()
        quantifier, factor = self._quantifier()
        if quantifier and (self._ended or self._opened > opened):
            raise self._error("repeats an anchor")
        self._begins = False
        if quantifier and (self._peek() in {"*", "+"} or _COUNT.match(self._text, self._at)):
            raise self._error("repeats a repetition")
        return rust + quantifier, self._checked(size * factor)

    def _checked(self, size: int) -> int:
        if size > MAX_EXPANDED:
            raise self._error(f"has more than {MAX_EXPANDED} characters when its counts are written out")
        return size

    def _quantifier(self) -> tuple[str, int]:
        """With how many copies it makes at most, or at least if there is no end. Laziness changes no language."""
        counts = _COUNT.match(self._text, self._at)
        if counts is not None:
            if len(counts[0]) > _LONGEST_COUNT:
                raise self._error("has a count that is too large")
            self._at = counts.end()
            low, high = int(counts[1]), int(counts[3] or -1) if counts[2] else int(counts[1])
            if 0 <= high < low:
                raise self._error("has a count that ends before it begins")
            self._take("?")
            return "{" + str(low) + ("" if high == low else "," if high < 0 else f",{high}") + "}", max(low, high, 1)
        if self._peek() in {"*", "+", "?"}:
            quantifier = self._next()
            self._take("?")
            return quantifier, 1
        return "", 1

    def _anchor(self) -> str:
        anchor = self._next()
        if anchor == "$":
            self._ended = True
        elif self._begins:
            self._opened += 1
        else:
            raise self._error("has an anchor ('^') in its middle")
        return anchor if self._in_json else ""

    def _atom(self) -> tuple[str, int]:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._class(), 1
        if character == ".":
            return _ANY_BUT_LINE_ENDS, 1
        if character == "\\":
            return self._escape(), 1
        return self._spelt(ord(character)), 1

    def _spelt(self, point: int) -> str:
        self._check_writable((point, point))
        return _spell(point)

    def _check_writable(self, *ranges: tuple[int, int]) -> None:
        """Raises ConstraintError if none of them can stand in a string of JSON: llguidance would drop them."""
        if not self._in_json:
            return
        if all(last < 0x80 and UNWRITABLE.issuperset(range(first, last + 1)) for first, last in ranges):
            raise self._error(f"has a control character (number {ranges[0][0]}) that cannot be written")

    def _group(self) -> tuple[str, int]:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"has groups nested more than {_MAX_DEPTH} deep")
        name = _GROUP_NAME.match(self._text, self._at)
        if name is not None:
            self._at = name.end()
        elif self._peek() == "?" and not self._take("?:"):
            self._refuse_group()
        rust, size = self._alternatives()
        if not self._take(")"):
            raise self._error("has a '(' without a ')'")
        self._depth -= 1
        return f"(?:{rust})", size

    def _refuse_group(self) -> None:
        for start, what in _REFUSED_GROUPS.items():
            if self._text.startswith(start, self._at):
                raise self._error(f"uses {what}, which is not supported")
        raise self._error("has a group of an unsupported kind, such as one with flags")

    def _escape(self) -> str:
        """Of an atom, after the backslash."""
        letter = self._peek()
        if letter in {"b", "B"}:
            raise self._error(f"uses a word boundary ('\\{letter}'), which is not supported")
        if letter == "k" or letter in set("123456789"):
            raise self._error("uses a backreference, which is not supported")
        return self._escaped_class() or self._spelt(self._code_point())

    def _escaped_class(self, *, inside: bool = False) -> str | None:
        """A class of its own, or as a member of another."""
        letter = self._peek()
        lower = letter.lower()
        if letter and lower in _CLASSES:
            self._at += 1
            negated = "^" if letter != lower else ""
            return _CLASSES[lower] if inside and not negated else f"[{negated}{_CLASSES[lower]}]"
        if letter in {"p", "P"}:
            self._at += 1
            named = _PROPERTY.match(self._text, self._at)
            if named is None:
                raise self._error("has an unknown class of characters")
            self._at = named.end()
            return f"\\{letter}{named[0]}"
        return None

    def _code_point(self) -> int:
        """The character that an escape stands for, after the backslash."""
        letter = self._next()
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter in _HEX:
            return self._hexadecimal(letter)
        if not letter or letter.isalnum() or letter == "_":
            raise self._error(f"has an unsupported escape ('\\{letter}')")
        return ord(letter)

    def _hexadecimal(self, letter: str) -> int:
        digits = _HEX[letter].match(self._text, self._at)
        if digits is None:
            raise self._error(f"has an unsupported escape ('\\{letter}')")
        self._at = digits.end()
        point = int(digits[digits.lastindex or 0], 16)
        if 0xD800 <= point < 0xDC00 and self._take("\\u"):
            low = _HEX["u"].match(self._text, self._at)
            if low is not None and low[1] and 0xDC00 <= int(low[1], 16) < 0xE000:
                self._at = low.end()
                return 0x10000 + (point - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        if 0xD800 <= point < 0xE000 or point > 0x10FFFF:
            raise self._error("names a character that does not exist")
        return point

    def _class(self) -> str:
        """After its opening bracket."""
        negated = self._take("^")
        members: list[str] = []
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            members.append(self._member(ranges))
        if not members:
            if negated:
                return r"[\s\S]"
            raise self._error("has an empty class of characters")
        if not negated and len(ranges) == len(members):
            self._check_writable(*ranges)
        return "[" + ("^" if negated else "") + "".join(members) + "]"

    def _member(self, ranges: list[tuple[int, int]]) -> str:
        """A character, a range or a class in a class. Adds the first and last character, unless it is a class."""
        first = self._member_end()
        if isinstance(first, str):
            return first
        if self._peek() != "-" or self._text[self._at + 1 : self._at + 2] in {"]", ""}:
            ranges.append((first, first))
            return _spell(first)
        self._at += 1
        last = self._member_end()
        if isinstance(last, str):
            return _spell(first) + _spell(ord("-")) + last
        if last < first:
            raise self._error("has a range that ends before it begins")
        ranges.append((first, last))
        return f"{_spell(first)}-{_spell(last)}"

    def _member_end(self) -> int | str:
        """A code point, or a whole class."""
        character = self._next()
        if not character:
            raise self._error("has a '[' without a ']'")
        if character != "\\":
            return ord(character)
        if self._take("b"):
            return 8
        escaped = self._escaped_class(inside=True)
        return self._code_point() if escaped is None else escaped

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        character = self._peek()
        self._at += 1
        return character

    def _take(self, expected: str) -> bool:
        found = self._text.startswith(expected, self._at)
        self._at += len(expected) * found
        return found

    def _error(self, problem: str) -> ConstraintError:
        return ConstraintError(self._path, f"The pattern {problem} (near character {self._at}).")


def _spell(point: int) -> str:
    """A character as nothing but itself, in and out of a class."""
    character = chr(point)
    return character if character.isascii() and character.isalnum() else f"\\x{{{point:x}}}"
