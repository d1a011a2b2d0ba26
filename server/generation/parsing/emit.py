"""Where pieces of a text go."""

from collections.abc import Callable, Iterable

from server.generation.parsing.parts import Part

Emit = Callable[[str], Iterable[Part]]
"""Makes parts of a piece of text; none, if it is kept until more is known."""


class Kept:
    """Keeps a piece of text, instead of passing it on."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def __call__(self, text: str) -> Iterable[Part]:
        """Implements Emit."""
        self._pieces.append(text)
        return ()

    @property
    def text(self) -> str:
        """All that was kept."""
        return "".join(self._pieces)


def nowhere(_: str) -> Iterable[Part]:
    """Drops a piece of text; implements Emit."""
    return ()
