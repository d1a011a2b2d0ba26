"""Text that fits a regular expression, or is one of some strings."""

from collections.abc import Sequence
from dataclasses import dataclass

from server.generation.constraints.errors import ConstraintError, check_text, under
from server.generation.constraints.fragment import Fragment, literal
from server.generation.constraints.patterns import read_terminal

MAX_CHOICES = 10_000
_MAX_CHARACTERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that an expression fits as a whole."""

    pattern: str
    path: str

    def terminal(self) -> str:
        """Raises ConstraintError for what `patterns` refuses."""
        return read_terminal(self.pattern, self.path)

    def fragment(self, name: str) -> Fragment:
        """Raises ConstraintError for what `patterns` refuses. Needs no rules."""
        return Fragment(self.terminal())


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some strings."""

    strings: Sequence[str]
    path: str

    def fragment(self, name: str) -> Fragment:
        """Raises ConstraintError for too few strings, too many, and one that is there twice or no text.

        They are one terminal, called `name` in capitals: as alternatives of a rule, only the longest of those that
        begin alike could be taken.
        """
        if not 1 <= len(self.strings) <= MAX_CHOICES:
            raise ConstraintError(self.path, f"Expected 1 to {MAX_CHOICES} strings.")
        if sum(map(len, self.strings)) > _MAX_CHARACTERS:
            raise ConstraintError(self.path, f"Expected no more than {_MAX_CHARACTERS} characters.")
        seen: set[str] = set()
        for index, string in enumerate(self.strings):
            check_text(string, under(self.path, index))
            if string in seen:
                raise ConstraintError(under(self.path, index), "The same string is there already.")
            seen.add(string)
        terminal = name.upper()
        return Fragment(terminal, f"{terminal}: {' | '.join(map(literal, self.strings))}\n")
