"""One of the answers that are compared, as it is shown."""

from collections.abc import Iterable

from nicegui import ui

from server.page.blocks import Blocks
from server.page.compare.answer import Answer, compared
from server.page.session import Session


class AnswerView:
    """Grows with its answer; at the end it says what there is to say of it."""

    def __init__(self, session: Session, name: str) -> None:
        self.answer = Answer()
        self._session = session
        self._num_shown = 0
        self._num_thought = 0
        with ui.element("article").classes("answer").props(f'aria-label="{name}"'):
            with ui.element("details").classes("reasoning empty"):
                with ui.element("summary"):
                    ui.label("Reasoning")
                self._reasoning = Blocks()
            with ui.element("div").classes("body"):
                self._text = Blocks()
            self._end = ui.element("div").classes("end-of-answer")

    def begin(self) -> Answer:
        """A new answer in place of the last one."""
        self.answer = Answer()
        self._num_shown = self._num_thought = 0
        self._text.set_text("")
        self._reasoning.set_text("")
        self._end.clear()
        return self.answer

    def show(self) -> None:
        """What has come since the last time."""
        if self._text.is_deleted:
            return
        thought, text = self.answer.reasoning[self._num_thought :], self.answer.text[self._num_shown :]
        if thought:
            self._reasoning.append(thought)
            self._num_thought += len(thought)
        if text:
            self._text.append(text)
            self._num_shown += len(text)

    def finish(self, first: Answer | None) -> None:
        """Say of a whole answer what there is to say; `first` is the one that it is compared with, if any."""
        answer = self.answer
        if self._end.is_deleted:
            return
        self._end.clear()
        with self._end:
            if answer.problem:
                ui.label(answer.problem).classes("problem").props("role=alert")
            for notice in answer.notices:
                ui.label(f"Left out or changed: {notice}").classes("warning")
            if first is not None and first.text and answer.text:
                ui.label(compared(answer.text, first.text)).classes("compared")
            ui.label(answer.facts).classes("quiet")
            if answer.text:
                copy = ui.button(icon="content_copy", on_click=lambda: self._session.browser.copy(answer.text))
                # No tooltip: it would not find its button where the answer ends while another view is looked at.
                copy.props('flat round dense size=sm aria-label="Copy" title="Copy"')


def show_all(views: Iterable[AnswerView]) -> None:
    """What has come to each of them since the last time."""
    for view in views:
        view.show()
