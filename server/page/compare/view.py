"""The compare view: a question, its settings, and the modes of the comparison."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from nicegui import background_tasks, context, ui

from server.page.capabilities import known_names
from server.page.compare.answering import ComparisonMode, Question
from server.page.compare.beams import BeamSearch
from server.page.compare.side_by_side import Samples, SideBySide
from server.page.elements import Composer, icon_button
from server.page.session import Session
from server.page.settings import SettingsPanel, new_seed

_SETTINGS, _SAMPLES, _BEAMS = "Several settings", "Several answers", "Beam search"
_SAYS = {
    _SETTINGS: "Answers one question with several settings or models. All use the same seed.",
    _SAMPLES: "Returns several answers to one request with the same settings.",
    _BEAMS: "Finds the most probable answers, and shows them as a tree of their common beginnings.",
}
_MOST_TOKENS = {_SETTINGS: 200, _SAMPLES: 200, _BEAMS: 40}
"""Default token limits; lower for beams, because a tree of long answers is hard to read."""


class CompareView:
    """Asks one question in the selected mode."""

    def __init__(self, session: Session, settings: SettingsPanel) -> None:
        self._session = session
        self._settings = settings
        self._known = known_names(session.fields)
        self._makers = self._offered()
        self._modes: dict[str, ComparisonMode] = {}
        self._most_tokens = dict(_MOST_TOKENS)
        self._running: asyncio.Task[None] | None = None
        with ui.element("section").classes("compare").props('aria-label="Compare"'):
            with ui.element("div").classes("scrolled").props("tabindex=0 role=region aria-label=Answers"):
                self._show_common()
                self._body = ui.element("div").classes("ways")
            self._status = ui.label().classes("unseen").props("role=status")
            self._composer = Composer(self._ask, self._stop)
        self._show_mode()
        session.on_model(self._fit_model)
        context.client.on_delete(self._stop)

    def _offered(self) -> dict[str, Callable[[], ComparisonMode]]:
        """The modes that the chosen model supports, by name, each as a function that makes it."""
        session = self._session
        makers: dict[str, Callable[[], ComparisonMode]] = {_SETTINGS: lambda: SideBySide(session, self._use_in_chat)}
        if session.has_field("n"):
            makers[_SAMPLES] = lambda: Samples(session, self._use_in_chat)
        if session.has_field("beam_search"):
            makers[_BEAMS] = lambda: BeamSearch(session)
        return makers

    def _fit_model(self) -> None:
        """Begin again if the chosen model supports other fields; answers that are being written go on."""
        known = known_names(self._session.fields)
        if known == self._known or self._running is not None:
            return
        self._known, self._makers = known, self._offered()
        self._modes.clear()
        self._body.clear()
        self._mode.set_options(list(self._makers), value=_SETTINGS)
        self._show_mode()

    def _show_common(self) -> None:
        with ui.element("div").classes("common"):
            self._mode = ui.toggle(list(self._makers), value=_SETTINGS, on_change=self._show_mode).classes("way")
            self._mode.props('no-caps flat toggle-color=chosen role=group aria-label="Mode of comparison"')
            self._says = ui.label().classes("quiet way-says")
            self._system = ui.textarea("System message").props("outlined autogrow dense rows=1").classes("system")
            self._seed = ui.number("Seed", value=new_seed(), min=0, precision=0).props("outlined dense")
            with self._seed.classes("seed").add_slot("append"):
                icon_button("casino", "New seed", lambda: self._seed.set_value(new_seed()), small=True)
            self._limit = ui.number("Max tokens", value=_MOST_TOKENS[_SETTINGS], min=1, precision=0)
            self._limit.props("outlined dense").classes("short").on_value_change(self._set_limit)
            self._logprobs = ui.switch("Log-probabilities", value=True)

    @property
    def _name(self) -> str:
        return str(self._mode.value)

    def _show_mode(self) -> None:
        """Show the selected mode, creating it when it is first selected."""
        name = self._name
        if name not in self._modes:
            with self._body, ui.element("div").bind_visibility_from(self._mode, "value", value=name):
                self._modes[name] = self._makers[name]()
        self._says.set_text(_SAYS[name])
        self._limit.set_value(self._most_tokens[name])
        # Beam search always requests them.
        self._logprobs.set_visibility(name != _BEAMS and self._session.has_field("logprobs"))

    def _set_limit(self) -> None:
        if self._limit.value is not None:
            self._most_tokens[self._name] = int(self._limit.value)

    async def _ask(self, prompt: str) -> bool:
        """Ask the question. Always returns False, so that the prompt stays and can be asked again."""
        if not prompt:
            return False
        mode = self._modes[self._name]
        numbers = {"Seed": self._seed.value, "Max tokens": self._limit.value}
        missing = (f"{name}: Enter a number." for name, value in numbers.items() if value is None)
        problem = mode.problem or next(missing, "")
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
            self._running = background_tasks.create(self._answer(mode, question), name="compare")
        return False

    async def _answer(self, mode: ComparisonMode, question: Question) -> None:
        self._set_answering(True, "The answers are being written.")
        try:
            await mode.answer(question)
        finally:
            self._running = None
            self._set_answering(False, "The answers are complete.")

    def _set_answering(self, answering: bool, status: str) -> None:
        self._composer.set_answering(answering)
        self._mode.set_enabled(not answering)
        self._status.set_text(status)

    def _stop(self) -> None:
        if self._running is not None:
            self._running.cancel()

    def _use_in_chat(self, settings: Mapping[str, Any]) -> None:
        self._settings.use(settings)
        ui.notify("The chat now uses these settings.")
