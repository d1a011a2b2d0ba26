r"""Text that matches a client's regular expression, or is one of several strings.

Clients write ECMAScript's expressions, and llguidance takes Rust's. In Rust's, `.` also matches some line ends, `\s`
has other characters, and brackets, `&&`, `--` and `~~` have a meaning in a class. So every character is escaped.
llguidance itself refuses look-around, backreferences and anchors that it cannot enforce.

In an expression for JSON strings, no class contains a character that these strings cannot contain: llguidance allows
every escape, also `\"` and `\\`, in a class with most of the control characters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from server.generation.constraints.check import check_grammar
from server.generation.constraints.fragment import ConstraintError, Fragment, check_text, literal, under, whole

MAX_EXPANDED = 10_000
"""Characters and classes of an expression with all its counts expanded: `(x{100}){100}` has 10,000."""
MAX_CHOICES = 10_000
_MAX_CHARACTERS = 1_000_000
_MAX_DEPTH = 50
_LONGEST_COUNT = len("{100000,100000}")

_ESCAPE = (
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}"
    r"|x[0-9a-fA-F]{2}|[pP]\{[A-Za-z_]+(?:=[A-Za-z_]+)?\}|.|\Z)"
)
_UNIT = re.compile(
    rf"""(?P<class>\[(?P<negated>\^?)(?P<members>(?:{_ESCAPE}|[^\]\\])*+)\])
    |(?P<escape>{_ESCAPE})
    |(?P<group>\((?:\?:|\?P?<[A-Za-z_]\w*>|(?P<refused>\?))?)
    |(?P<count>\{{[0-9]+(?:,[0-9]*)?\}}|[*+?])\??
    |(?P<sign>[)|$^])
    |(?P<unended>\[.*)
    |(?P<character>.)""",
    re.VERBOSE | re.DOTALL,
)
_MEMBER = re.compile(rf"(?P<first>{_ESCAPE}|[^\\])(?:-(?P<last>{_ESCAPE}|[^\\]))?", re.DOTALL)
_INNER_CLASS = r"\[(?:\\(?:.|\Z)|[^\]\\])*(?:\]|\Z)"
_RUST_CLASS = rf"\[(?:\\(?:.|\Z)|{_INNER_CLASS}|[^\]\[\\])*(?:\]|\Z)"
"""A class, with classes in it. One without an end takes the rest, so that reading takes linear time."""
_RUST_UNIT = re.compile(rf"\\x[0-9A-Fa-f]{{2}}|\\[xu]\{{\w+\}}|\\.|{_RUST_CLASS}|\{{(\d+)(?:,(\d*))?\}}|.", re.DOTALL)
_SPACE = r"\x09\x0a\x0c\x0d\x20\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE}
_VERTICAL_TAB = r"\x0b"
"""White space that JSON strings cannot contain."""
_LINE_ENDS = r"\x0a\x0d\u2028\u2029"
_NEVER = r"\x00-\x07\x0b\x0e-\x1f\x7f"
"""Characters that JSON strings cannot contain, inside a class: they would need `\\uXXXX`, which is not allowed."""
_WRITABLE = ((0x08, 0x0A), (0x0C, 0x0D), (0x20, 0x7E), (0x80, 0x10FFFF))
"""All other characters, as ranges."""
_UNWRITABLE_PROBLEM = "has a control character that cannot be written in JSON"
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that matches an expression as a whole, with or without anchors."""

    pattern: str
    path: str

    def terminal(self) -> str:
        """The expression as a Lark terminal. Raises ConstraintError for what cannot be enforced."""
        rust = _Translation(self.pattern, self.path, in_json=False).rust
        terminal = f"/{rust}/" if rust else '""'
        check_grammar(whole(Fragment(terminal)), self.path)
        return terminal

    def fragment(self, name: str) -> Fragment:
        """The expression as a grammar without rules. Raises ConstraintError for what cannot be enforced."""
        return Fragment(self.terminal())


@dataclass(frozen=True, slots=True)
class OneOfStrings:
    """One of several strings."""

    strings: Sequence[str]
    path: str

    def fragment(self, name: str) -> Fragment:
        """A terminal with all strings, called `name` in capitals.

        Raises ConstraintError for too few or too many strings, duplicates, and strings that are not valid text. The
        strings form one terminal, because as alternatives of a rule, llguidance would take only the longest of those
        with a common beginning.
        """
        if not 1 <= len(self.strings) <= MAX_CHOICES:
            raise ConstraintError(self.path, f"Expected 1 to {MAX_CHOICES} strings.")
        if sum(map(len, self.strings)) > _MAX_CHARACTERS:
            raise ConstraintError(self.path, f"Expected no more than {_MAX_CHARACTERS} characters.")
        seen: set[str] = set()
        for index, string in enumerate(self.strings):
            check_text(string, under(self.path, index))
            if string in seen:
                raise ConstraintError(under(self.path, index), "This string occurs twice.")
            seen.add(string)
        terminal = name.upper()
        return Fragment(terminal, f"{terminal}: {' | '.join(map(literal, self.strings))}\n")


def read_pattern(pattern: str, path: str) -> str:
    """Translate an expression for a part of a JSON string, or for all of it with anchors.

    Raises ConstraintError for an expression that is too large or has no equivalent in Rust. The result may still fail
    to compile in llguidance.
    """
    return _Translation(pattern, path, in_json=True).rust


def regex_size(rust: str) -> int:
    """Upper bound on the characters and classes of a Rust expression with all its counts expanded."""
    stack, last = [0], 0
    for unit in _RUST_UNIT.finditer(rust):
        if unit[0] == "(":
            stack.append(0)
            last = 0
        elif unit[0] == ")" and len(stack) > 1:
            last = stack.pop()
            stack[-1] += last
        elif unit[0] in {"|", "^", "$"}:
            last = 0
        elif unit[1] is not None:
            stack[-1] += last * (max(int(unit[1][:9]), int((unit[2] or "0")[:9])) - 1)
        else:
            last = 1
            stack[-1] += 1
    return sum(stack)


class _Translation:
    """An expression of ECMAScript in Rust's syntax."""

    def __init__(self, pattern: str, path: str, *, in_json: bool) -> None:
        """With `in_json`, the expression is for JSON strings, in which some control characters cannot occur."""
        check_text(pattern, path)
        self._path = path
        self._never = _NEVER if in_json else ""
        self._at = self._depth = 0
        self._repeats = False
        """Whether the previous unit was a repetition."""
        self.rust = "".join(map(self._unit, _UNIT.finditer(pattern)))
        if regex_size(self.rust) > MAX_EXPANDED:
            raise self._error(f"has more than {MAX_EXPANDED} characters with its counts expanded")

    def _error(self, problem: str) -> ConstraintError:
        return ConstraintError(self._path, f"The pattern {problem} (near character {self._at}).")

    def _unit(self, unit: re.Match[str]) -> str:
        self._at = unit.start()
        was_repetition, self._repeats = self._repeats, unit["count"] is not None
        if unit["count"] is not None:
            if was_repetition:
                raise self._error("repeats a repetition")
            if len(unit["count"]) > _LONGEST_COUNT:
                raise self._error("has a count that is too large")
            return unit["count"]
        if unit["group"] is not None:
            return self._group(unit)
        if unit["class"] is not None:
            return self._class(unit)
        if unit["sign"] is not None:
            self._depth -= unit["sign"] == ")"
            return unit["sign"]
        if unit["escape"] is not None:
            point = self._escaped(unit["escape"])
            return self._without_never(point) if isinstance(point, str) else self._spelt(point)
        if unit["unended"] is not None:
            raise self._error("has a '[' without a ']'")
        return f"[^{_LINE_ENDS}{self._never}]" if unit["character"] == "." else self._spelt(ord(unit["character"]))

    def _group(self, unit: re.Match[str]) -> str:
        """The beginning of a group, without its name."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"has groups nested more than {_MAX_DEPTH} deep")
        if unit["refused"] is None:
            return "(?:"
        if unit.string.startswith(("=", "!", "<=", "<!"), unit.end()):
            raise self._error("uses lookahead or lookbehind, which is not supported")
        raise self._error("has an unsupported kind of group, such as one with flags")

    def _class(self, unit: re.Match[str]) -> str:
        """A class, without the characters that JSON strings cannot contain."""
        members = "".join(map(self._member, _MEMBER.finditer(unit["members"])))
        if unit["negated"]:
            return f"[^{members}{self._never}]" if members or self._never else r"[\s\S]"
        if not unit["members"]:
            raise self._error("has an empty character class")
        if not members:
            raise self._error(_UNWRITABLE_PROBLEM)
        return self._without_never(members)

    def _without_never(self, members: str) -> str:
        """A class of members that are writable unless they are Unicode properties."""
        return f"[{members}--[{self._never}]]" if self._never and "\\p{" in members.lower() else f"[{members}]"

    def _member(self, member: re.Match[str]) -> str:
        """A member of a class: a range, or the characters that its escapes stand for."""
        first = self._escaped(member["first"], in_class=True)
        last = first if member["last"] is None else self._escaped(member["last"], in_class=True)
        if isinstance(first, int) and isinstance(last, int):
            return self._range(first, last)
        parts = [first] if member["last"] is None else [first, ord("-"), last]
        return "".join(part if isinstance(part, str) else self._range(part, part) for part in parts)

    def _range(self, first: int, last: int) -> str:
        """The writable part of a range, inside a class; all of an invalid range, which Rust refuses."""
        if not self._never or first > last:
            return _spell_range(first, last)
        parts = ((max(first, start), min(last, end)) for start, end in _WRITABLE)
        return "".join(_spell_range(start, end) for start, end in parts if start <= end)

    def _escaped(self, text: str, *, in_class: bool = False) -> int | str:
        """The character that an escape stands for, or its replacement inside a class."""
        if not text.startswith("\\"):
            return ord(text)
        letter = text[1:2]
        lower = letter.lower()
        if letter and lower in _CLASSES:
            members = _CLASSES[lower] + (_VERTICAL_TAB if lower == "s" and not self._never else "")
            return members if letter == lower else f"[^{members}{self._never}]"
        if letter in {"p", "P"}:
            return self._property(text)
        if letter == "b" and in_class:
            return 8
        if letter in {"b", "B"}:
            raise self._error(f"uses a word boundary ('\\{letter}'), which is not supported")
        if letter == "k" or letter in set("123456789"):
            raise self._error("uses a backreference, which is not supported")
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter in {"x", "u"} and len(text) > 2:
            return self._code_point(text)
        if not letter or letter.isalnum() or letter == "_":
            raise self._error(f"has an unsupported escape ('\\{letter}')")
        return ord(letter)

    def _property(self, escape: str) -> str:
        if len(escape) == 2:
            raise self._error("has an unknown character class")
        return escape

    def _code_point(self, escape: str) -> int:
        first, _, second = escape[2:].partition("\\u")
        point = int(first.strip("{}"), 16)
        if second:
            return 0x10000 + (point - 0xD800) * 0x400 + int(second, 16) - 0xDC00
        if 0xD800 <= point < 0xE000 or point > 0x10FFFF:
            raise self._error("names a character that does not exist")
        return point

    def _spelt(self, point: int) -> str:
        """One character outside of a class."""
        if not self._range(point, point):
            raise self._error(_UNWRITABLE_PROBLEM)
        return _spell(point)


def _spell_range(first: int, last: int) -> str:
    return _spell(first) if first == last else f"{_spell(first)}-{_spell(last)}"


def _spell(point: int) -> str:
    """A character as an escape that means only itself, inside and outside a class."""
    character = chr(point)
    return character if character.isascii() and character.isalnum() else f"\\x{{{point:x}}}"
