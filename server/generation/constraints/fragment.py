r"""Constraints as fragments of grammars in llguidance's dialect of Lark, and functions that combine them.

How llguidance 1.9 treats these grammars, found by experiment:

- `/(.|\n)*/ "END"` never ends: the terminal takes everything it can, the END too. A rule marked `[lazy]` ends at the
  first END, and excludes all other readings; `[suffix="END"]` does the same. Hence `until`.
- For the same reason, nothing may follow a terminal that could continue with it: `/[0-9]+/ "5"` never ends.
- Of alternatives with a common beginning, the longest terminal wins: `"ab" "c" | "a" "b" "d"` excludes "abd". Strings
  that share their first terminals must form one terminal, as the strings of a choice do.
- `%json {...}` and `%lark {...}` may replace a rule's name. A nested Lark grammar has its own names and `%ignore`, sees
  none from outside, and must end its last line before the brace.
- Free text contains no special tokens. Tokens by id, `<[7]>`, may follow it at any place without `[lazy]`.
- Because of `no_forcing`, the text of a special token means only its letters.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from server.errors import shorten
from server.generation.notices import Notice

_HEADER = '%llguidance {"no_forcing": true}\n'
"""Without this, a literal that spells a special token would require that token."""
FREE_TEXT = r"/(.|\n)*/"


class ConstraintError(Exception):
    """A constraint cannot be enforced exactly, or not within the limits."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        """Path of the part at fault, in the client's field."""
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Fragment:
    """A grammar expression that can be used anywhere in a rule, with the definitions that it needs."""

    start: str
    rules: str = ""
    """Whole lines. Their names begin with the unique name that was given to the fragment's maker."""
    notices: tuple[Notice, ...] = ()
    """Notices of parts of a client's schemas that are not enforced, or more strictly than they say."""


class Constraint(Protocol):
    """A constraint on an answer."""

    def fragment(self, name: str) -> Fragment:
        """A grammar that exactly the valid answers match. Its rules begin with `name`, a lower-case word.

        Raises ConstraintError for a constraint that cannot be enforced.
        """


def under(path: str, key: str | int) -> str:
    """The path of something inside the value at `path`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    key = shorten(key).encode(errors="replace").decode()
    return f"{path}.{key}" if path else key


def check_text(text: str, path: str) -> None:
    """Raises ConstraintError for a text that is not valid Unicode, which tokens cannot spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConstraintError(path, "The text contains half of a surrogate pair, which is not a character.") from None


def literal(text: str) -> str:
    """A Lark string for exactly this text."""
    return json.dumps(text)


def tokens(ids: Iterable[int]) -> Fragment:
    """One of these tokens, whatever its text."""
    return Fragment("<[" + ",".join(map(str, sorted(ids))) + "]>")


def text(exact: str) -> Fragment:
    """Exactly this text."""
    return Fragment(literal(exact))


def sequence(*parts: Fragment) -> Fragment:
    """The parts, one after the other."""
    return Fragment(" ".join(part.start for part in parts), *_combined(parts))


def either(*parts: Fragment) -> Fragment:
    """One of the parts. They should differ in their first terminals."""
    return Fragment("(" + " | ".join(part.start for part in parts) + ")", *_combined(parts))


def repeated(part: Fragment, *, at_least: int = 0, at_most: int | None = None) -> Fragment:
    """The part at least `at_least` and at most `at_most` times."""
    return replace(part, start=f"({part.start}){{{at_least},{'' if at_most is None else at_most}}}")


def until(body: str, end: str, name: str) -> Fragment:
    """A terminal, then `end` at the first place where both match. `name` is the rule's name."""
    return Fragment(name, f"{name}[lazy]: {body} {literal(end)}\n")


def whole(fragment: Fragment) -> str:
    """The complete grammar that consists of this fragment."""
    return f"{_HEADER}start: {fragment.start}\n{fragment.rules}"


def _combined(parts: Iterable[Fragment]) -> tuple[str, tuple[Notice, ...]]:
    """The rules and the notices of all parts."""
    parts = list(parts)
    return "".join(part.rules for part in parts), tuple(notice for part in parts for notice in part.notices)
