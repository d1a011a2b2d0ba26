"""What all constraints have in common."""

from typing import Protocol

from server.generation.constraints.check import check_grammar
from server.generation.constraints.fragment import Fragment, whole


class Constraint(Protocol):
    """Something that a text can be held to."""

    def fragment(self, name: str) -> Fragment:
        """The piece of a grammar that only such texts fit. Its rules begin with `name`, a lower-case word.

        Raises ConstraintError for what cannot be enforced.
        """


def grammar_of(constraint: Constraint, path: str) -> str:
    """The complete grammar of an answer that is held to this and nothing else.

    Raises ConstraintError for what cannot be enforced or does not compile; the latter with `path`.
    """
    grammar = whole(constraint.fragment("answer"))
    check_grammar(grammar, path)
    return grammar
