"""Answers side by side: one for each of several settings, or several choices of one request."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nicegui import ui
from nicegui.element import Element

from server.page.answer import MeasuredAnswer
from server.page.compare.answering import AnswerView, Question, ask
from server.page.compare.presets import FIRST, PRESETS, Chooser, Preset, offered
from server.page.elements import icon_button, name_button
from server.page.session import Session
from server.page.throttle import throttled

_MOST = 4
_LEAST = 2
_NUMBERS = (2, 3, 4, 5, 6, 7, 8)


class Columns(Element, component="../static/columns.js"):
    """Columns of answers, in which the browser marks differences from the first answer."""

    def __init__(self) -> None:
        super().__init__()
        self.classes("columns")

    def mark_differences(self) -> None:
        """Mark the differences between complete answers."""
        self.run_method("mark")

    def clear_marks(self) -> None:
        """Remove the marks before answers change."""
        self.run_method("unmark")


class SideBySide:
    """The mode that answers a question with two to four different settings."""

    def __init__(self, session: Session, on_use: Callable[[Mapping[str, Any]], None]) -> None:
        """`on_use` receives the settings to use in the chat."""
        self._session = session
        self._on_use = on_use
        self._presets = offered(PRESETS, session.fields)
        self._columns: list[_Column] = []
        self._place = Columns()
        self._add_button = ui.button("Add a column", icon="add", on_click=self._add).props("flat no-caps")
        first = [name for name in FIRST if name in self._presets]
        for name in first if len(first) >= _LEAST else list(self._presets)[:_LEAST]:
            self._add_column(name)

    @property
    def problem(self) -> str:
        return next((column.chooser.problem for column in self._columns if column.chooser.problem), "")

    async def answer(self, question: Question) -> None:
        self._place.clear_marks()
        columns = list(self._columns)
        try:
            async with (
                throttled(partial(_show_all, [column.view for column in columns])) as more,
                asyncio.TaskGroup() as group,
            ):
                for column in columns:
                    column.begin(group, question, more)
        finally:
            for column in self._columns[1:]:  # not `columns`: some may have been removed meanwhile
                column.view.finish(self._columns[0].view.answer)
            self._place.mark_differences()

    def _add(self) -> None:
        taken = {column.chooser.name for column in self._columns}
        self._add_column(next((name for name in self._presets if name not in taken), next(iter(self._presets))))

    def _add_column(self, preset: str) -> None:
        with self._place:
            column = _Column(self._session, self._presets, preset, self._on_use, self._remove)
        self._columns.append(column)
        self._number()

    def _remove(self, column: "_Column") -> None:
        self._place.clear_marks()
        column.delete()
        self._columns.remove(column)
        self._number()

    def _number(self) -> None:
        for at, column in enumerate(self._columns):
            column.show_number(at + 1, can_be_removed=len(self._columns) > _LEAST)
        self._add_button.set_visibility(len(self._columns) < _MOST)


class _Column:
    """One column: decoding settings and the answer."""

    def __init__(
        self,
        session: Session,
        presets: Mapping[str, Preset],
        first: str,
        on_use: Callable[[Mapping[str, Any]], None],
        on_remove: Callable[["_Column"], None],
    ) -> None:
        self._session = session
        self._task: asyncio.Task[None] | None = None
        with ui.element("section").classes("lane") as self._section:
            with ui.element("div").classes("lane-head"):
                with ui.element("div").classes("line"):
                    self._name = ui.label().classes("name").props("role=heading aria-level=2")
                    self._stop = icon_button("stop", "Stop", self.stop, small=True)
                    self._stop.set_visibility(False)
                    self._remove = icon_button("close", "Remove", lambda: on_remove(self), small=True)
                self._model = ui.select([card.id for card in session.models], value=session.model or None)
                self._model.props('outlined dense options-dense aria-label="Model of this column"').classes("wide")
                self._model.set_visibility(session.has_several)
                self.chooser = Chooser(session, presets, first)
                _make_use_button(self.chooser, on_use)
            self.view = AnswerView(session, "Answer")

    def begin(self, group: asyncio.TaskGroup, question: Question, on_more: Callable[[], None]) -> None:
        """Start a task that answers the question."""
        self._stop.set_visibility(True)
        self._task = group.create_task(self._answer(question, self.view.begin(), on_more))

    def stop(self) -> None:
        """Stop this answer only."""
        if self._task is not None:
            self._task.cancel()

    def delete(self) -> None:
        self.stop()
        self._section.delete()

    def show_number(self, number: int, *, can_be_removed: bool) -> None:
        self._name.set_text(f"Column {number}")
        self._section.props(f'aria-label="Column {number}"')
        name_button(self._stop, f"Stop column {number}")
        name_button(self._remove, f"Remove column {number}").set_visibility(can_be_removed)

    async def _answer(self, question: Question, answer: MeasuredAnswer, on_more: Callable[[], None]) -> None:
        try:
            model = {"model": self._model.value} if self._session.has_several else {}
            await ask(self._session, question, self.chooser.settings | model, [answer], on_more)
        finally:
            self._task = None
            if not self._section.is_deleted:
                self._stop.set_visibility(False)
                self.view.show()
                self.view.finish(None)


class Samples:
    """The mode that shows several choices of one request."""

    def __init__(self, session: Session, on_use: Callable[[Mapping[str, Any]], None]) -> None:
        """`on_use` receives the settings to use in the chat."""
        self._session = session
        # Beam search returns beams instead of independent choices.
        several = [preset for preset in PRESETS if "beam_search" not in preset.settings]
        with ui.element("div").classes("one-setting"):
            self._chooser = Chooser(session, offered(several, session.fields), "Sampling")
            self._number = ui.select(list(_NUMBERS), value=4, label="Answers (n)").props("outlined dense options-dense")
            self._number.classes("short")
            _make_use_button(self._chooser, on_use)
        self._place = Columns()

    @property
    def problem(self) -> str:
        return self._chooser.problem

    async def answer(self, question: Question) -> None:
        number = int(self._number.value)
        self._place.clear_marks()
        self._place.clear()
        with self._place:
            views = [self._make_view(f"Answer {at}") for at in range(1, number + 1)]
        answers = [view.answer for view in views]
        settings = {**self._chooser.settings, "n": number}
        try:
            async with throttled(partial(_show_all, views)) as more:
                await ask(self._session, question, settings, answers, more)
        finally:
            for view in views:
                view.finish(None if view is views[0] else answers[0])
            self._place.mark_differences()

    def _make_view(self, name: str) -> AnswerView:
        with ui.element("section").classes("lane").props(f'aria-label="{name}"'):
            with ui.element("div").classes("lane-head"):
                ui.label(name).classes("name").props("role=heading aria-level=2")
            return AnswerView(self._session, name)


def _show_all(views: list[AnswerView]) -> None:
    for view in views:
        view.show()


def _make_use_button(chooser: Chooser, on_use: Callable[[Mapping[str, Any]], None]) -> None:
    use = ui.button("Use in chat", on_click=lambda: on_use(chooser.settings))
    use.props("flat no-caps dense").classes("use")
