"""One way of decoding, and several answers of one request."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nicegui import ui

from server.page.compare.answer_view import AnswerView, show_all
from server.page.compare.asking import Question, ask
from server.page.compare.chooser import Chooser
from server.page.compare.columns import Columns
from server.page.compare.presets import PRESETS, offered
from server.page.pacing import now_and_then
from server.page.session import Session

_NUMBERS = (2, 3, 4, 5, 6, 7, 8)


class Samples:
    """Its choices beside each other."""

    def __init__(self, session: Session, on_use: Callable[[Mapping[str, Any]], None]) -> None:
        """`on_use` gets the settings that the chat should have."""
        self._session = session
        # A search has beams in place of choices.
        several = [preset for preset in PRESETS if "beam_search" not in preset.settings]
        presets = offered(several, session.fields)
        with ui.element("div").classes("one-setting"):
            self._chooser = Chooser(session, presets, "Sampling")
            self._number = ui.select(list(_NUMBERS), value=4, label="Answers (n)").props("outlined dense options-dense")
            self._number.classes("short")
            use = ui.button("Use in chat", on_click=lambda: on_use(self._chooser.settings))
            use.props("flat no-caps dense").classes("use")
        self._place = Columns()

    @property
    def problem(self) -> str:
        """What has to be mended before a question can be asked; empty for nothing."""
        return self._chooser.problem

    async def answer(self, question: Question) -> None:
        """Returns when all answers are there. Cancelling it stops them."""
        number = int(self._number.value)
        self._place.clear_marks()
        self._place.clear()
        with self._place:
            views = [_column(self._session, at + 1) for at in range(number)]
        answers = [view.begin() for view in views]
        settings = {**self._chooser.settings, "n": number}
        try:
            async with now_and_then(partial(show_all, views)) as more:
                await ask(self._session, question, settings, answers, more)
        finally:
            for view in views:
                view.finish(None if view is views[0] else answers[0])
            self._place.mark_differences()


def _column(session: Session, number: int) -> AnswerView:
    with ui.element("section").classes("lane").props(f'aria-label="Answer {number}"'):
        with ui.element("div").classes("lane-head"):
            ui.label(f"Answer {number}").classes("name").props("role=heading aria-level=2")
        return AnswerView(session, f"Answer {number}")
