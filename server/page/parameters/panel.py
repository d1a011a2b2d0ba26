"""The drawer of settings: the system's message, and the form of parameters."""

from collections.abc import Mapping
from typing import Any

from nicegui import ui

from server.page.api import ApiError
from server.page.parameters.form import ParametersForm
from server.page.session import Session


class SettingsPanel:
    """What all requests of the chat are sent with; remembered by the browser."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_of_conversation = False
        with ui.column().classes("panel"):
            ui.label("Settings").classes("title").props("role=heading aria-level=2")
            self._system = ui.textarea("System message", value=session.memory.system or "")
            self._system.props("outlined autogrow dense").classes("wide").on_value_change(self._remember_system)
            self._place = ui.element("div").classes("wide")
        self._show(session.memory.settings or {})

    @property
    def system(self) -> str:
        return str(self._system.value or "").strip()

    def show_system(self, text: str | None) -> None:
        """Of a conversation; None: the one that new conversations begin with."""
        self._is_of_conversation = text is not None
        self._system.set_value(self._session.memory.system or "" if text is None else text)

    @property
    def request(self) -> dict[str, Any]:
        """The model and the settings."""
        return {"model": self._session.model, **self._form.values}

    @property
    def problem(self) -> str:
        """What has to be mended before a request can be sent; empty for nothing."""
        return self._form.problem

    def use(self, settings: Mapping[str, Any]) -> None:
        """Take these in place of those that were set."""
        self._show(settings)
        self._remember()

    def blame(self, problem: ApiError) -> None:
        """Show beside a setting what the server says of it, where it says that of one."""
        self._form.blame(problem.param, str(problem))

    def _show(self, settings: Mapping[str, Any]) -> None:
        self._place.clear()
        with self._place:
            self._form = ParametersForm(self._session.fields, settings, self._remember)

    def _remember(self) -> None:
        self._session.browser.remember("settings", self._form.values)

    def _remember_system(self) -> None:
        if not self._is_of_conversation:
            self._session.memory.system = self.system
            self._session.browser.remember("system", self.system)
