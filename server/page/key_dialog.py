"""Asks for an API key."""

import asyncio

from nicegui import ui


class KeyDialog:
    """One for each tab, however many requests want a key at once."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[str] | None = None
        with ui.dialog().props('aria-label="API key"') as self._dialog, ui.card().classes("dialog"):
            ui.label("This server wants an API key").classes("title").props("role=heading aria-level=2")
            self._reason = ui.label().classes("problem").props("role=alert")
            self._input = ui.input("API key", password=True, password_toggle_button=True).props("outlined autofocus")
            self._input.classes("wide").on("keydown.enter", lambda: self._end(self._input.value))
            ui.label("It is kept until this tab is closed, and sent to this server only.").classes("quiet")
            with ui.row().classes("end"):
                ui.button("Cancel", on_click=lambda: self._end("")).props("flat no-caps")
                ui.button("Use this key", on_click=lambda: self._end(self._input.value)).props("no-caps unelevated")
        self._dialog.on("hide", lambda: self._end(""))

    async def ask(self, reason: str) -> str:
        """The key that was typed; empty if whoever was asked has none."""
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
            self._reason.set_text(reason)
            self._input.set_value("")
            self._dialog.open()
        return await asyncio.shield(self._waiting)

    def _end(self, key: str) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(key.strip())
        self._dialog.close()
