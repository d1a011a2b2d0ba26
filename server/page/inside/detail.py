"""One token: its probability, and what else it might have been."""

import math
from collections.abc import Callable
from functools import partial

from nicegui import ui

from server.page.answers import Alternative
from server.page.inside.replay import Token, shown, source_in_words


class Detail:
    """Beside or below the tokens."""

    def __init__(self, on_branch: Callable[[int, Alternative], None] | None) -> None:
        """`on_branch` gets a token's number and what is to be in its place; None where the server cannot do that."""
        self._on_branch = on_branch
        self._place = ui.element("section").classes("detail").props('aria-label="Token" aria-live=polite')
        with self._place:
            ui.label("Choose a token to see what else it might have been.").classes("quiet")

    def show(self, index: int, token: Token, count: int) -> None:
        """Token number `index` of `count`, from 0."""
        self._place.clear()
        with self._place:
            ui.label(shown(token.seen.token)).classes("chosen")
            rank = "beyond those listed" if token.rank is None else f"number {token.rank}"
            source = "" if token.source is None else f" · {source_in_words(token.source)}"
            ui.label(f"Token {index + 1:,} of {count:,} · {_percent(token.probability)}, {rank}{source}").classes(
                "quiet"
            )
            with ui.element("ul").classes("alternatives"):
                for one in token.alternatives:
                    self._alternative(index, one, is_chosen=one is token.seen)
                if len(token.alternatives) > 1:
                    self._bar("all others", token.rest)
            if self._on_branch is not None:
                ui.label("Choose another one, and the answer goes on from there in the chat.").classes("quiet")

    def _alternative(self, index: int, one: Alternative, *, is_chosen: bool) -> None:
        branch = None if is_chosen or self._on_branch is None else partial(self._on_branch, index, one)
        self._bar(shown(one.token), math.exp(one.logprob), branch, is_chosen=is_chosen)

    def _bar(
        self, text: str, probability: float, on_click: Callable[[], None] | None = None, *, is_chosen: bool = False
    ) -> None:
        with ui.element("li").classes("is-chosen" if is_chosen else ""):
            if on_click is None:
                ui.label(text).classes("what")
            else:
                button = ui.button(text, on_click=on_click).props("flat dense no-caps align=left").classes("what")
                button.props["aria-label"] = f"Go on with {text}, {_percent(probability)}"
            ui.label(_percent(probability)).classes("percent")
            ui.element("div").classes("bar").style(f"--share: {100 * probability:.1f}%")


def _percent(probability: float) -> str:
    share = 100 * probability
    return f"{share:.1f} %" if share >= 0.1 or share == 0 else f"{share:.1g} %"
