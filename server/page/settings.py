"""Request settings: a form that knows ranges and exclusions, and the drawer that shows it."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nicegui import ui

from server.page.api import ApiError
from server.page.capabilities import Field, Fields, conflicts, fields_of
from server.page.elements import icon_button
from server.page.session import Session

_SEEDS = 1 << 31
"""Upper limit of seeds that all servers accept."""


def new_seed() -> int:
    """A random seed that all servers accept."""
    return secrets.randbelow(_SEEDS)


class ParametersForm:
    """The form of request settings. Settings that are not added are not sent, so the server's defaults apply."""

    def __init__(self, descriptions: Fields, values: Mapping[str, Any], on_change: Callable[[], None]) -> None:
        """`descriptions` is the server's description of its fields, `values` the initial settings."""
        self._fields = fields_of(descriptions, also=values)
        self._on_change = on_change
        self._rows: dict[str, _Row] = {}
        with ui.column().classes("form"):
            names = {name: name.replace("_", " ") for name in self._fields}
            self._choice = ui.select(names, label="Add a setting", with_input=True, on_change=self._choose)
            self._choice.props("outlined dense options-dense").classes("wide")
            self._list = ui.column().classes("wide settings")
            ui.label("Settings that are not listed use the server's defaults.").classes("quiet")
        for name, value in values.items():
            self._add_row(name, value)
        self._show_relations()

    @property
    def values(self) -> dict[str, Any]:
        """The valid settings."""
        return {name: row.value for name, row in self._rows.items() if not row.problem}

    @property
    def problem(self) -> str:
        """The first invalid setting and its error; empty if all are valid."""
        return next((f"{name}: {row.problem}" for name, row in self._rows.items() if row.problem), "")

    def show_error(self, param: str | None, message: str) -> None:
        """Show the server's error next to the setting that it names, if any."""
        row = self._rows.get((param or "").partition(".")[0].partition("[")[0])
        if row is not None:
            row.show_problem(message)

    def _choose(self) -> None:
        name = self._choice.value
        if name is None:
            return
        self._choice.set_value(None)
        if name not in self._rows:
            self._add_row(name, _start_of(self._fields[name]))
            self._changed()
        self._rows[name].focus()

    def _add_row(self, name: str, value: Any) -> None:
        field = self._fields.get(name, Field(name, "json", "The server does not support this field."))
        with self._list:
            self._rows[name] = _Row(field, value, self._changed, self._remove)

    def _remove(self, name: str) -> None:
        self._rows.pop(name).delete()
        self._changed()

    def _changed(self) -> None:
        self._show_relations()
        self._on_change()

    def _show_relations(self) -> None:
        for name, row in self._rows.items():
            said = []
            if found := conflicts(name, self._fields, self._rows):
                said.append(f"Cannot be combined with {', '.join(found)}.")
            if missing := [one for one in row.field.requires if one not in self._rows]:
                said.append(f"Requires {', '.join(missing)}.")
            row.show_relations(" ".join(said))


class _Row:
    """The form's row for one setting."""

    def __init__(
        self, field: Field, value: Any, on_change: Callable[[], None], on_remove: Callable[[str], None]
    ) -> None:
        if not field.shows(value):  # for example stored while another server was used
            field = replace(field, kind="json")
        self.field = field
        self.value = value
        self.problem = ""
        """Why the input is invalid; empty if it is valid."""
        self._on_change = on_change
        with ui.element("div").classes("setting") as self._row:
            with ui.row().classes("between"):
                ui.label(field.name).classes("name")
                icon_button("close", f"Remove {field.name}", lambda: on_remove(field.name), small=True)
            self._control = self._make_control(value)
            self._control.props["aria-label"] = field.name
            self._problem_label = ui.label().classes("problem").props("role=alert")
            self._problem_label.set_visibility(False)
            self._relations = ui.label().classes("warning")
            ui.label(_help_of(field)).classes("quiet")

    def focus(self) -> None:
        if self.field.kind != "boolean":  # a switch has no such method
            self._control.run_method("focus")

    def delete(self) -> None:
        self._row.delete()

    def show_problem(self, text: str) -> None:
        self._problem_label.set_text(text)
        self._problem_label.set_visibility(bool(text))

    def show_relations(self, text: str) -> None:
        self._relations.set_text(text)
        self._relations.set_visibility(bool(text))

    def _make_control(self, value: Any) -> ui.element:
        field = self.field
        control: ui.element
        match field.kind:
            case "boolean":
                return ui.switch(value=bool(value), on_change=lambda event: self._set(event.value))
            case "choice":
                choices = {one: str(one) for one in field.choices}
                control = ui.select(choices, value=value, on_change=lambda event: self._set(event.value))
            case "integer" | "number":
                control = ui.number(
                    value=value if isinstance(value, int | float) else None,
                    min=field.minimum,
                    max=field.maximum,
                    step=1 if field.kind == "integer" else 0.05,
                    on_change=lambda event: self._set_number(event.value),
                )
            case "text":
                control = ui.input(value=str(value), on_change=lambda event: self._set(event.value))
            case _:
                control = ui.textarea(value=field.format(value), on_change=lambda event: self._set_text(event.value))
                control.props("autogrow input-class=code")
        return control.props("outlined dense").classes("wide")

    def _set(self, value: Any, problem: str = "") -> None:
        self.value, self.problem = value, problem
        self.show_problem(problem)
        self._on_change()

    def _set_number(self, value: float | None) -> None:
        if value is None:
            self._set(None, "Enter a number.")
        elif self.field.kind == "integer" and value != int(value):
            self._set(value, "Enter a whole number.")
        elif not self.field.has_in_range(value):
            self._set(value, f"Must be {self.field.range}.")
        else:
            self._set(int(value) if self.field.kind == "integer" else value)

    def _set_text(self, text: str) -> None:
        try:
            self._set(self.field.parse(text or ""))
        except ValueError as error:
            self._set(text, str(error))


def _start_of(field: Field) -> Any:
    """Initial value of a setting that is added to the form."""
    if field.default is not None:
        return field.default
    match field.kind:
        case "boolean":
            return True
        case "choice":
            return field.choices[0]
        case "integer" | "number":
            return max(0, field.minimum or 0)
        case "text":
            return ""
        case "texts":
            return []
        case _:
            return {}


def _help_of(field: Field) -> str:
    default = "" if field.default is None else f"Default: {field.default}."
    bounds = f"{field.range[:1].upper()}{field.range[1:]}." if field.range else ""
    hint = "A hint: ignored where it does not apply." if field.is_hint else ""
    said = field.description.replace("`", "")
    return " ".join(part for part in (said, bounds, default, hint) if part)


class SettingsPanel:
    """The chat's system message and settings, stored in the browser."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_of_conversation = False
        with ui.column().classes("panel"):
            ui.label("Settings").classes("title").props("role=heading aria-level=2")
            self._system = ui.textarea("System message", value=session.stored.system or "")
            self._system.props("outlined autogrow dense").classes("wide").on_value_change(self._remember_system)
            self._place = ui.element("div").classes("wide")
        self._show(session.stored.settings or {})
        session.on_model(lambda: self._show(self._form.values))

    @property
    def system(self) -> str:
        return str(self._system.value or "").strip()

    def show_system(self, text: str | None) -> None:
        """Show a conversation's system message; None shows the default for new conversations."""
        self._is_of_conversation = text is not None
        self._system.set_value(self._session.stored.system or "" if text is None else text)

    @property
    def request(self) -> dict[str, Any]:
        """The request fields: model and settings."""
        return {"model": self._session.model, **self._form.values}

    @property
    def problem(self) -> str:
        """The first invalid setting and its error; empty if all are valid."""
        return self._form.problem

    def use(self, settings: Mapping[str, Any]) -> None:
        """Replace all settings."""
        self._show(settings)
        self._remember()

    def show_error(self, problem: ApiError) -> None:
        """Show the server's error next to the setting that it names, if any."""
        self._form.show_error(problem.param, str(problem))

    def _show(self, settings: Mapping[str, Any]) -> None:
        self._place.clear()
        with self._place:
            self._form = ParametersForm(self._session.fields, settings, self._remember)

    def _remember(self) -> None:
        self._session.browser.remember("settings", self._form.values)

    def _remember_system(self) -> None:
        if not self._is_of_conversation:
            self._session.stored.system = self.system
            self._session.browser.remember("system", self.system)
