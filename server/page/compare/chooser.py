"""How an answer is decoded: by a preset, or by settings of one's own."""

from collections.abc import Mapping
from typing import Any

from nicegui import ui

from server.page.compare.presets import Preset
from server.page.parameters.form import ParametersForm
from server.page.session import Session

_CUSTOM = "Custom"
_CUSTOM_SAYS = "Settings of your own."


class Chooser:
    """A list of presets, what the chosen one does, and a form in which its settings can be changed."""

    def __init__(self, session: Session, presets: Mapping[str, Preset], first: str) -> None:
        """`first` is the preset to begin with."""
        self._session = session
        self._presets = presets
        self._settings = dict(presets[first].settings)
        self._form: ParametersForm | None = None
        with ui.element("div").classes("chooser"):
            with ui.element("div").classes("line"):
                self._choice = ui.select([*presets, _CUSTOM], value=first, on_change=self._choose)
                self._choice.props('outlined dense options-dense aria-label="Decoding"').classes("grow")
                change = ui.button(icon="tune", on_click=self._open)
                change.props('flat round dense aria-label="Change its settings"').tooltip("Change its settings")
            self._says = ui.label().classes("says")
            self._asked = ui.label().classes("asked")
        with ui.dialog().props('aria-label="Settings of this answer"') as self._dialog, ui.card().classes("dialog"):
            self._place = ui.column().classes("wide")
        self._show()

    @property
    def name(self) -> str:
        return str(self._choice.value)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of a request."""
        return dict(self._settings)

    @property
    def problem(self) -> str:
        """What has to be mended before a request can be sent; empty for nothing."""
        return self._form.problem if self._form is not None else ""

    def _choose(self) -> None:
        preset = self._presets.get(self.name)
        if preset is None and not self._dialog.value:
            self._open()
        elif preset is not None:
            self._form = None
            self._settings = dict(preset.settings)
        self._show()

    def _open(self) -> None:
        self._place.clear()
        with self._place:
            ui.label("Settings of this answer").classes("title").props("role=heading aria-level=2")
            self._form = ParametersForm(self._session.fields, self._settings, self._change)
            with ui.row().classes("end"):
                ui.button("Done", on_click=self._dialog.close).props("no-caps unelevated")
        self._dialog.open()

    def _change(self) -> None:
        if self._form is not None:
            self._settings = self._form.values
            self._choice.set_value(_CUSTOM)
            self._show()

    def _show(self) -> None:
        preset = self._presets.get(self.name)
        self._says.set_text(_CUSTOM_SAYS if preset is None else preset.says)
        self._asked.set_text(asked(self._settings))


def asked(settings: Mapping[str, Any]) -> str:
    """Settings in a line."""
    return " · ".join(f"{name} {_short(value)}" for name, value in settings.items()) or "nothing set"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_short(one)}" for name, one in value.items()) or "on"
    return str(value).lower() if isinstance(value, bool) else str(value)
