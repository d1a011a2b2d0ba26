"""The tokens of an answer as boxes in the browser."""

from collections.abc import Callable, Sequence

from nicegui.element import Element
from nicegui.events import GenericEventArguments

from server.page.inside.figures import Figures, percent, source_name, surprise
from server.page.inside.tokens import Token, probability


class TokenMap(Element, component="../static/tokens.js"):
    """Grows at its end, and says which token was chosen."""

    def __init__(self, on_choose: Callable[[int], None]) -> None:
        """`on_choose` gets the place of a token."""
        super().__init__()
        self._rows: list[tuple[str, float, str, int]] = []
        self._is_there = False
        self.on("ready", self._begin)
        self.on("choose", lambda event: _tell(event, on_choose))

    def append(self, tokens: Sequence[Token], figures: Figures) -> None:
        """Show more of them. `figures` are those of all tokens up to their end."""
        rows = [_row(token, figures) for token in tokens]
        self._rows += rows
        if self._is_there:
            self.run_method("append", rows)

    def empty(self) -> None:
        """Show none."""
        self._rows = []
        self.run_method("empty")

    def _begin(self) -> None:
        """The browser has the element, and nothing in it."""
        self._is_there = True
        self.run_method("append", self._rows)


def _row(token: Token, figures: Figures) -> tuple[str, float, str, int]:
    """Its text, how surprising it is, what is said of it, and its source's colour."""
    said = [percent(probability(token.logprob)), *([source_name(token.source)] if token.source else [])]
    return token.text, round(surprise(token), 3), ", ".join(said), figures.colour(token.source)


def _tell(event: GenericEventArguments, on_choose: Callable[[int], None]) -> None:
    if isinstance(event.args, int):
        on_choose(event.args)
