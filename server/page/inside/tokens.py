"""The tokens of an answer as boxes."""

from collections.abc import Callable, Sequence
from typing import Literal

from nicegui.element import Element
from nicegui.events import GenericEventArguments

from server.page.inside.replay import Token

Colours = Literal["probability", "source"]


class Tokens(Element, component="../static/tokens.js"):
    """One element for all of them, however many: the browser makes the boxes."""

    def __init__(self, on_chosen: Callable[[int], None]) -> None:
        """`on_chosen` gets the number of the token that is looked at."""
        super().__init__()
        self.on("chosen", lambda event: on_chosen(_index(event)))
        self._sources: list[str] = []

    def append(self, tokens: Sequence[Token]) -> None:
        """Show more at the end."""
        told = [[token.seen.token, round(token.probability, 4), self._number(token.source)] for token in tokens]
        self.run_method("append", told)

    def clear_tokens(self) -> None:
        """Show none."""
        self._sources.clear()
        self.run_method("clear")

    def colour_by(self, colours: Colours) -> None:
        """What the colours of the boxes mean."""
        self.run_method("colourBy", colours)

    def _number(self, source: str | None) -> int:
        """That the colour of a source has; 0 is no draft's."""
        if source is None or not source.startswith("draft:"):
            return 0
        if source not in self._sources:
            self._sources.append(source)
        return self.number_of(source)

    def number_of(self, source: str) -> int:
        """The same, of a source that was shown."""
        return 1 + self._sources.index(source) % 6 if source in self._sources else 0


def _index(event: GenericEventArguments) -> int:
    return int(event.args)
