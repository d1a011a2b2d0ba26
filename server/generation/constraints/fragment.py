r"""Constraints as pieces of a grammar in llguidance's dialect of Lark, and how these are put together.

What llguidance 1.9 does with such a grammar, found out by running it:

- `/(.|\n)*/ "END"` ends at no END: a terminal takes all that it can, the END too, and the grammar never ends. A rule
  marked `[lazy]` ends at the first END there is, and no other reading of the text is left. `[suffix="END"]` does the
  same. Hence `until`.
- For the same reason nothing may follow a terminal that could go on with it: `/[0-9]+/ "5"` never ends.
- Of alternatives that begin alike the longest terminal wins: `"ab" "c" | "a" "b" "d"` has no "abd". Alternatives
  that differ later than in their first terminals belong into one terminal, as the strings of a choice do.
- `%json {...}` and `%lark {...}` stand where a rule's name may. A nested Lark grammar has names and `%ignore` of its
  own, sees none from outside, and must end its last line before the brace.
- Free text has no special tokens; those by id, `<[7]>`, may follow it at any place without being lazy.
- The text of a special token means just its letters, because of `no_forcing`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from server.errors import shorten

_HEADER = '%llguidance {"no_forcing": true}\n'
"""Without it a literal that spells a special token would demand that token."""
FREE_TEXT = r"/(.|\n)*/"


class ConstraintError(Exception):
    """A constraint that cannot be met exactly, or not within bounds."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        """The path of the part at fault, in the client's field."""
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Fragment:
    """An expression that can stand anywhere in a rule, and the definitions that it needs."""

    start: str
    rules: str = ""
    """Whole lines. Their names begin with the name that the fragment's maker was given, so it must be unique."""


class Constraint(Protocol):
    """A form that an answer must have."""

    def fragment(self, name: str) -> Fragment:
        """The piece of a grammar that only such texts fit. Its rules begin with `name`, a lower-case word.

        Raises ConstraintError for a form that cannot be enforced.
        """


def under(path: str, key: str | int) -> str:
    """The path of something inside what is at `path`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    key = shorten(key).encode(errors="replace").decode()
    return f"{path}.{key}" if path else key


def check_text(text: str, path: str) -> None:
    """Raises ConstraintError for a text that no tokens can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConstraintError(path, "The text has half of a surrogate pair, which is no character.") from None


def literal(text: str) -> str:
    """A string of Lark that stands for this text and nothing else."""
    return json.dumps(text)


def tokens(ids: Iterable[int]) -> Fragment:
    """One of these tokens, whatever its text."""
    return Fragment("<[" + ",".join(map(str, sorted(ids))) + "]>")


def text(exact: str) -> Fragment:
    """A text and nothing else."""
    return Fragment(literal(exact))


def sequence(*parts: Fragment) -> Fragment:
    """One after the other."""
    return Fragment(" ".join(part.start for part in parts), _rules(parts))


def either(*parts: Fragment) -> Fragment:
    """One of them. They should differ in their first terminals."""
    return Fragment("(" + " | ".join(part.start for part in parts) + ")", _rules(parts))


def repeated(part: Fragment, *, at_least: int = 0, at_most: int | None = None) -> Fragment:
    """Any number of times, but not fewer than `at_least` and not more than `at_most`."""
    return Fragment(f"({part.start}){{{at_least},{'' if at_most is None else at_most}}}", part.rules)


def until(body: str, end: str, name: str) -> Fragment:
    """A terminal and then `end`, at the first place where both fit. The rule's name is `name`."""
    return Fragment(name, f"{name}[lazy]: {body} {literal(end)}\n")


def whole(fragment: Fragment) -> str:
    """The complete text of a grammar of nothing but this fragment."""
    return f"{_HEADER}start: {fragment.start}\n{fragment.rules}"


def _rules(parts: Iterable[Fragment]) -> str:
    return "".join(part.rules for part in parts)
