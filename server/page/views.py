"""The views of the page, of which most are made when somebody looks at them first."""

from collections.abc import Callable

from nicegui import ui


class Views:
    """The tabs of the head, and what is shown below it."""

    def __init__(self, *names: str) -> None:
        """Tabs of these names, where it is called."""
        self._later: dict[str, Callable[[], object]] = {}
        with ui.tabs().props("dense no-caps").classes("views") as self._tabs:
            for name in names:
                ui.tab(name)
        self._names = names

    def open(self) -> None:
        """Empty views, where it is called, of which the first is looked at."""
        panels = ui.tab_panels(self._tabs, value=self._names[0], animated=False, keep_alive=True).classes("panels")
        with panels:
            self._panels = {name: ui.tab_panel(name) for name in self._names}
        panels.on_value_change(lambda event: self._make(event.value))

    def panel(self, name: str) -> ui.tab_panel:
        """Where the elements of a view are made."""
        return self._panels[name]

    def make_later(self, name: str, make: Callable[[], object]) -> None:
        """Call this among the elements of a view when it is first looked at."""
        self._later[name] = make

    def _make(self, name: str) -> None:
        make = self._later.pop(name, None)
        if make is not None:
            with self._panels[name]:
                make()
