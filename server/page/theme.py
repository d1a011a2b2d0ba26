"""Light, dark, or as the system has it."""

from nicegui import ui

from server.page.browser import Browser

_THEMES: dict[str, tuple[bool | None, str]] = {
    "auto": (None, "brightness_auto"),
    "light": (False, "light_mode"),
    "dark": (True, "dark_mode"),
}


class ThemeButton:
    """Goes from one to the next."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._dark = ui.dark_mode(None)
        self._theme = "auto"

    def build(self) -> None:
        """Where it is called."""
        self._button = ui.button(on_click=self._next).props("flat round dense")
        self.set(self._theme)

    def set(self, theme: str | None) -> None:
        """Show this one; None, or one that is not known: as the system has it."""
        self._theme = theme if theme in _THEMES else "auto"
        self._dark.value, icon = _THEMES[self._theme]
        self._button.set_icon(icon)
        self._button.props(f'aria-label="Theme: {self._theme}"')

    def _next(self) -> None:
        names = list(_THEMES)
        self.set(names[(names.index(self._theme) + 1) % len(names)])
        self._browser.remember("theme", self._theme)
