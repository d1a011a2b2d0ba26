"""The form of a request's settings: those that were chosen, each with its range and what it excludes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nicegui import ui

from server.page.described import Fields
from server.page.parameters.catalog import Field, conflicts, fields_of


class ParametersForm:
    """Settings by name; those that nobody has chosen are not sent, so that the server's own hold."""

    def __init__(self, described: Fields, values: Mapping[str, Any], on_change: Callable[[], None]) -> None:
        """`described` is what the server says of its fields, `values` what is set at first."""
        self._fields = fields_of(described, also=values)
        self._values = dict(values)
        self._wrong: dict[str, str] = {}
        """Why what was typed is no value."""
        self._on_change = on_change
        self._rows: dict[str, _Row] = {}
        self._build()

    @property
    def values(self) -> dict[str, Any]:
        """What requests are sent with."""
        return {name: value for name, value in self._values.items() if name not in self._wrong}

    @property
    def problem(self) -> str:
        """What has to be mended first; empty for nothing."""
        return next((f"{name}: {said}" for name, said in self._wrong.items()), "")

    def blame(self, param: str | None, message: str) -> bool:
        """Show what the server says of one of the settings; whether it is one of them."""
        row = self._rows.get((param or "").partition(".")[0].partition("[")[0])
        if row is None:
            return False
        row.show_problem(message)
        return True

    def _build(self) -> None:
        with ui.column().classes("form"):
            names = {name: name.replace("_", " ") for name in self._fields}
            self._choice = ui.select(names, label="Add a setting", with_input=True, on_change=self._choose)
            self._choice.props("outlined dense options-dense").classes("wide")
            self._list = ui.column().classes("wide settings")
            self._none = ui.label("What is not set here is as the server has it.").classes("quiet")
        for name in self._values:
            self._add_row(name)
        self._show_relations()

    def _choose(self) -> None:
        name = self._choice.value
        if name is None:
            return
        self._choice.set_value(None)
        if name not in self._rows:
            field = self._fields[name]
            self._values[name] = _start_of(field)
            self._add_row(name)
            self._changed()
        self._rows[name].focus()

    def _add_row(self, name: str) -> None:
        field = self._fields.get(name, Field(name, "json", "The server does not know it."))
        with self._list:
            self._rows[name] = _Row(field, self._values[name], self._set, self._remove)

    def _set(self, name: str, value: Any, problem: str) -> None:
        self._values[name] = value
        if problem:
            self._wrong[name] = problem
        else:
            self._wrong.pop(name, None)
        self._changed()

    def _remove(self, name: str) -> None:
        self._values.pop(name, None)
        self._wrong.pop(name, None)
        self._rows.pop(name).delete()
        self._changed()

    def _changed(self) -> None:
        self._show_relations()
        self._on_change()

    def _show_relations(self) -> None:
        for name, row in self._rows.items():
            said = []
            if found := conflicts(name, self._fields, self._rows):
                said.append(f"Not together with {', '.join(found)}.")
            if missing := [one for one in row.field.requires if one not in self._rows]:
                said.append(f"Needs {', '.join(missing)}.")
            row.show_relations(" ".join(said))


class _Row:
    """One setting."""

    def __init__(
        self, field: Field, value: Any, on_set: Callable[[str, Any, str], None], on_remove: Callable[[str], None]
    ) -> None:
        if not field.shows(value):  # from elsewhere, or of another server
            field = replace(field, kind="json")
        self.field = field
        self._on_set = on_set
        with ui.element("div").classes("setting") as self._row:
            with ui.row().classes("between"):
                ui.label(field.name).classes("name")
                remove = ui.button(icon="close", on_click=lambda: on_remove(field.name))
                remove.props("flat round dense size=sm").props["aria-label"] = f"Remove {field.name}"
            self._control = self._make_control(value)
            self._control.props["aria-label"] = field.name
            self._problem = ui.label().classes("problem").props("role=alert")
            self._problem.set_visibility(False)
            self._relations = ui.label().classes("warning")
            ui.label(_help_of(field)).classes("quiet")

    def focus(self) -> None:
        if self.field.kind != "boolean":  # a switch has no such method
            self._control.run_method("focus")

    def delete(self) -> None:
        self._row.delete()

    def show_problem(self, text: str) -> None:
        self._problem.set_text(text)
        self._problem.set_visibility(bool(text))

    def show_relations(self, text: str) -> None:
        self._relations.set_text(text)
        self._relations.set_visibility(bool(text))

    def _make_control(self, value: Any) -> ui.element:
        field = self.field
        match field.kind:
            case "boolean":
                return ui.switch(value=bool(value), on_change=lambda event: self._set(event.value))
            case "choice":
                choices = {one: str(one) for one in field.choices}
                select = ui.select(choices, value=value, on_change=lambda event: self._set(event.value))
                return select.props("outlined dense").classes("wide")
            case "integer" | "number":
                step = 1 if field.kind == "integer" else 0.05
                number = ui.number(
                    value=value if isinstance(value, int | float) else None,
                    min=field.minimum,
                    max=field.maximum,
                    step=step,
                    on_change=lambda event: self._set_number(event.value),
                )
                return number.props("outlined dense").classes("wide")
            case "text":
                text = ui.input(value=str(value), on_change=lambda event: self._set(event.value))
                return text.props("outlined dense").classes("wide")
            case _:
                area = ui.textarea(value=field.format(value), on_change=lambda event: self._set_text(event.value))
                return area.props("outlined dense autogrow input-class=code").classes("wide")

    def _set(self, value: Any, problem: str = "") -> None:
        self.show_problem(problem)
        self._on_set(self.field.name, value, problem)

    def _set_number(self, value: float | None) -> None:
        if value is None:
            self._set(None, "A number is missing.")
        elif self.field.kind == "integer" and value != int(value):
            self._set(value, "It takes whole numbers.")
        elif _is_outside(value, self.field):
            self._set(value, f"It takes {self.field.range}.")
        else:
            self._set(int(value) if self.field.kind == "integer" else value)

    def _set_text(self, text: str) -> None:
        try:
            self._set(self.field.parse(text or ""))
        except ValueError as error:
            self._set(text, str(error))


def _is_outside(value: float, field: Field) -> bool:
    below = field.minimum is not None and value < field.minimum
    return below or (field.maximum is not None and value > field.maximum)


def _start_of(field: Field) -> Any:
    """What a setting that was just chosen begins with."""
    if field.default is not None:
        return field.default
    starts = {"boolean": True, "integer": max(0, field.minimum or 0), "number": max(0, field.minimum or 0)}
    if field.kind == "choice":
        return field.choices[0]
    return starts.get(field.kind, [] if field.kind == "texts" else {} if field.kind == "json" else "")


def _help_of(field: Field) -> str:
    default = "" if field.default is None else f"Default: {field.default}."
    bounds = f"{field.range[:1].upper()}{field.range[1:]}." if field.range else ""
    hint = "A hint: left out where it means nothing." if field.is_hint else ""
    said = field.description.replace("`", "")
    return " ".join(part for part in (said, bounds, default, hint) if part)
