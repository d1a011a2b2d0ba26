"""What a beam search has found, as a tree."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nicegui import ui

from server.page.compare.answer import Answer, num_same
from server.page.compare.asking import Question, ask
from server.page.compare.beams import described, pieces_of, tree_of
from server.page.compare.chooser import Chooser
from server.page.compare.columns import BeamTree
from server.page.compare.presets import BEAM_PRESETS, offered
from server.page.pacing import now_and_then
from server.page.session import Session
from server.page.wording import STOPPED, count

_LEGEND = (
    "What all beams begin with stands once; each branch begins with the probability of its first token there. "
    "The best beam is emphasised."
)


class BeamSearch:
    """One request. While it runs, only what all beams have in common is known."""

    def __init__(self, session: Session) -> None:
        self._session = session
        presets = offered(BEAM_PRESETS, session.fields)
        with ui.element("div").classes("one-setting"):
            self._chooser = Chooser(session, presets, next(iter(presets)))
        self._state = ui.label(_LEGEND).classes("quiet")
        self._settled = ui.label().classes("settled")
        self._problem = ui.label().classes("problem").props("role=alert")
        self._tree = BeamTree()
        self._show_settled([])

    @property
    def problem(self) -> str:
        """What has to be mended before a question can be asked; empty for nothing."""
        return self._chooser.problem

    async def answer(self, question: Question) -> None:
        """Returns when the beams are shown. Cancelling it stops the search."""
        settings = self._chooser.settings
        answers = [Answer() for _ in range(num_returned(settings))]
        self._problem.set_text("")
        self._tree.show(None)
        self._state.set_text("The beams have nothing in common yet.")
        question = replace(question, wants_logprobs=self._session.has_field("logprobs"))
        try:
            async with now_and_then(lambda: self._show_settled(answers)) as more:
                await ask(self._session, question, settings, answers, more)
        finally:
            self._finish(answers)

    def _show_settled(self, answers: list[Answer]) -> None:
        text = answers[0].text if answers else ""
        for answer in answers:
            text = text[: num_same(text, answer.text)]
        if text:
            self._state.set_text(f"All beams begin with these {count(len(text), 'character')}; the search goes on.")
        self._settled.set_text(text)
        self._settled.set_visibility(bool(text))

    def _finish(self, answers: list[Answer]) -> None:
        if self._tree.is_deleted:
            return
        self._show_settled([])
        found = [answer for answer in answers if answer.finish_reason not in (None, STOPPED)]
        self._problem.set_text(answers[0].problem)
        self._state.set_text(_LEGEND if found else "The search ended before it had found anything.")
        if found:
            self._tree.show(described(tree_of([pieces_of(answer) for answer in found]), found))


def num_returned(settings: Mapping[str, Any]) -> int:
    """How many of the beams are shown, by the settings of a request."""
    search = settings.get("beam_search")
    number = search.get("num_return") if isinstance(search, Mapping) else None
    return number if isinstance(number, int) and number > 0 else 1
