"""Several settings, each with its answer to the same question."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nicegui import ui

from server.page.compare.answer import Answer
from server.page.compare.answer_view import AnswerView, show_all
from server.page.compare.asking import Question, ask
from server.page.compare.chooser import Chooser
from server.page.compare.columns import Columns
from server.page.compare.presets import FIRST, PRESETS, Preset, offered
from server.page.pacing import now_and_then
from server.page.session import Session

_MOST = 4
_LEAST = 2


class SideBySide:
    """Two to four columns."""

    def __init__(self, session: Session, on_use: Callable[[Mapping[str, Any]], None]) -> None:
        """`on_use` gets the settings that the chat should have."""
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
        """What has to be mended before a question can be asked; empty for nothing."""
        return next((column.chooser.problem for column in self._columns if column.chooser.problem), "")

    async def answer(self, question: Question) -> None:
        """Returns when all columns have their answers. Cancelling it stops them."""
        self._place.clear_marks()
        columns = list(self._columns)
        show = partial(show_all, [column.view for column in columns])
        try:
            async with now_and_then(show) as more, asyncio.TaskGroup() as group:
                for column in columns:
                    column.begin(group, question, more)
        finally:
            for column in self._columns[1:]:  # those that are still there
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
    """One way of decoding, and its answer."""

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
                    self._stop = ui.button(icon="stop", on_click=self.stop).props("flat round dense size=sm")
                    self._stop.tooltip("Stop").set_visibility(False)
                    self._remove = ui.button(icon="close", on_click=lambda: on_remove(self))
                    self._remove.props("flat round dense size=sm").tooltip("Remove")
                self.chooser = Chooser(session, presets, first)
                use = ui.button("Use in chat", on_click=lambda: on_use(self.chooser.settings))
                use.props("flat no-caps dense").classes("use")
            self.view = AnswerView(session, "Answer")

    def begin(self, group: asyncio.TaskGroup, question: Question, on_more: Callable[[], None]) -> None:
        """Answer the question."""
        self._stop.set_visibility(True)
        answer = self.view.begin()
        self._task = group.create_task(self._answer(question, answer, on_more))

    def stop(self) -> None:
        """The other columns go on."""
        if self._task is not None:
            self._task.cancel()

    def delete(self) -> None:
        """Its answer is stopped."""
        self.stop()
        self._section.delete()

    def show_number(self, number: int, *, can_be_removed: bool) -> None:
        """Of the columns, it is this one."""
        self._name.set_text(f"Column {number}")
        self._section.props(f'aria-label="Column {number}"')
        self._stop.props(f'aria-label="Stop column {number}"')
        self._remove.props(f'aria-label="Remove column {number}"')
        self._remove.set_visibility(can_be_removed)

    async def _answer(self, question: Question, answer: Answer, on_more: Callable[[], None]) -> None:
        try:
            await ask(self._session, question, self.chooser.settings, [answer], on_more)
        finally:
            self._task = None
            if not self._section.is_deleted:
                self._stop.set_visibility(False)
                self.view.show()
                self.view.finish(None)
