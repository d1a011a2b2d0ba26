"""The comparison: a question, and the ways in which it can be answered."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from nicegui import background_tasks, context, ui

from server.page.compare.answering import Question, Way
from server.page.compare.beams import BeamSearch
from server.page.compare.side_by_side import Samples, SideBySide
from server.page.elements import Composer, icon_button
from server.page.session import Session
from server.page.settings import SettingsPanel, new_seed

_SETTINGS, _SAMPLES, _BEAMS = "Several settings", "Several answers", "Beam search"
_SAYS = {
    _SETTINGS: "One question, and an answer by each of several settings. All draw by the same seed, "
    "so that only the settings make a difference.",
    _SAMPLES: "One request, and several answers by the same settings.",
    _BEAMS: "The most probable answers that a search finds, as a tree of what they have in common.",
}
_MOST_TOKENS = {_SETTINGS: 200, _SAMPLES: 200, _BEAMS: 40}
"""Defaults. A tree of long answers is hard to read."""


class CompareView:
    """Asks one question in one of several ways."""

    def __init__(self, session: Session, settings: SettingsPanel) -> None:
        self._session = session
        self._settings = settings
        self._makers: dict[str, Callable[[], Way]] = {_SETTINGS: lambda: SideBySide(session, self._use_in_chat)}
        if session.has_field("n"):
            self._makers[_SAMPLES] = lambda: Samples(session, self._use_in_chat)
        if session.has_field("beam_search"):
            self._makers[_BEAMS] = lambda: BeamSearch(session)
        self._ways: dict[str, Way] = {}
        self._most_tokens = dict(_MOST_TOKENS)
        self._running: asyncio.Task[None] | None = None
        with ui.element("section").classes("compare").props('aria-label="Compare"'):
            with ui.element("div").classes("scrolled").props("tabindex=0 role=region aria-label=Answers"):
                self._show_common()
                self._body = ui.element("div").classes("ways")
            self._status = ui.label().classes("unseen").props("role=status")
            self._composer = Composer(self._ask, self._stop)
        self._look()
        context.client.on_delete(self._stop)

    def _show_common(self) -> None:
        with ui.element("div").classes("common"):
            self._way = ui.toggle(list(self._makers), value=_SETTINGS, on_change=self._look).classes("way")
            self._way.props('no-caps flat toggle-color=chosen role=group aria-label="What is compared"')
            self._says = ui.label().classes("quiet way-says")
            self._system = ui.textarea("System message").props("outlined autogrow dense rows=1").classes("system")
            self._seed = ui.number("Seed", value=new_seed(), min=0, precision=0).props("outlined dense")
            with self._seed.classes("seed").add_slot("append"):
                icon_button("casino", "New seed", lambda: self._seed.set_value(new_seed()), small=True)
            self._limit = ui.number("Most tokens", value=_MOST_TOKENS[_SETTINGS], min=1, precision=0)
            self._limit.props("outlined dense").classes("short").on_value_change(self._limit_way)
            self._logprobs = ui.switch("Log-probabilities", value=True)

    @property
    def _name(self) -> str:
        return str(self._way.value)

    def _look(self) -> None:
        """Show the chosen way, which is made when it is first chosen."""
        name = self._name
        if name not in self._ways:
            with self._body, ui.element("div").bind_visibility_from(self._way, "value", value=name):
                self._ways[name] = self._makers[name]()
        self._says.set_text(_SAYS[name])
        self._limit.set_value(self._most_tokens[name])
        # A tree has them in any case.
        self._logprobs.set_visibility(name != _BEAMS and self._session.has_field("logprobs"))

    def _limit_way(self) -> None:
        if self._limit.value is not None:
            self._most_tokens[self._name] = int(self._limit.value)

    async def _ask(self, prompt: str) -> bool:
        """Never takes the prompt away, because the user asks it again with other settings."""
        way = self._ways[self._name]
        numbers = {"Seed": self._seed.value, "Most tokens": self._limit.value}
        missing = (f"{name}: A number is missing." for name, value in numbers.items() if value is None)
        problem = way.problem or next(missing, "")
        if problem:
            ui.notify(problem, type="negative")
        elif self._running is None:
            question = Question(
                system=str(self._system.value or "").strip(),
                prompt=prompt,
                seed=int(self._seed.value),
                max_tokens=self._most_tokens[self._name],
                wants_logprobs=bool(self._logprobs.value and self._logprobs.visible),
            )
            self._running = background_tasks.create(self._answer(way, question), name="compare")
        return False

    async def _answer(self, way: Way, question: Question) -> None:
        self._set_answering(True, "The answers are being written.")
        try:
            await way.answer(question)
        finally:
            self._running = None
            self._set_answering(False, "The answers are complete.")

    def _set_answering(self, answering: bool, status: str) -> None:
        self._composer.set_answering(answering)
        self._way.set_enabled(not answering)
        self._status.set_text(status)

    def _stop(self) -> None:
        if self._running is not None:
            self._running.cancel()

    def _use_in_chat(self, settings: Mapping[str, Any]) -> None:
        self._settings.use(settings)
        ui.notify("The chat has these settings now.")
