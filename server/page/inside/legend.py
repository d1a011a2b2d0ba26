"""What the colours of tokens mean."""

from nicegui import ui

from server.page.inside.figures import Figures

_MARKS = ("100 %", "10 %", "1 %", "0.1 % or less")
"""Each as far from the next as it is in surprise."""


class ProbabilityLegend:
    """A scale."""

    def __init__(self) -> None:
        with ui.element("div").classes("legend scale") as self.element:
            ui.element("div").classes("gradient").props("aria-hidden=true")
            with ui.element("div").classes("between"):
                for mark in _MARKS:
                    ui.label(mark)


class SourceLegend:
    """The sources, with how many tokens came from each."""

    def __init__(self) -> None:
        self.element = ui.element("ul").classes("legend")
        self._labels: list[ui.label] = []

    def clear(self) -> None:
        """No tokens are there."""
        self.element.clear()
        self._labels = []

    def show(self, figures: Figures) -> None:
        """As it is by now; sources are only ever added."""
        for at, (said, colour) in enumerate(figures.legend()):
            if at < len(self._labels):
                self._labels[at].set_text(said)
                continue
            with self.element, ui.element("li"):
                ui.element("span").classes(f"token source-{colour}").props("aria-hidden=true")
                self._labels.append(ui.label(said))
