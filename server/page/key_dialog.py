"""Asks for an API key."""

import asyncio

from nicegui import context, ui
from nicegui.events import ValueChangeEventArguments

from server.page.api import can_be_sent


class KeyDialog:
    """One for each tab, however many requests want a key at once."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[str] | None = None
        with ui.dialog().props('aria-label="API key"') as self._dialog, ui.card().classes("dialog"):
            ui.label("This server wants an API key").classes("title").props("role=heading aria-level=2")
            self._reason = ui.label().classes("problem").props("role=alert")
            self._input = ui.input("API key", password=True, password_toggle_button=True).props("outlined autofocus")
            self._input.classes("wide").on("keydown.enter", self._use)
            ui.label("It is kept until this tab is closed, and sent to this server only.").classes("quiet")
            with ui.row().classes("end"):
                ui.button("Cancel", on_click=self._dialog.close).props("flat no-caps")
                ui.button("Use this key", on_click=self._use).props("no-caps unelevated")
        self._dialog.on_value_change(self._change)
        context.client.on_delete(self._leave)

    async def ask(self, reason: str) -> str:
        """The key that was typed; empty if whoever was asked has none. Is cancelled if the tab is gone."""
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
            self._reason.set_text(reason)
            self._input.set_value("")
            self._dialog.open()
        return await asyncio.shield(self._waiting)

    def _use(self) -> None:
        key = self._input.value.strip()
        if can_be_sent(key):
            self._end(key)
            self._dialog.close()
        else:
            self._reason.set_text("This is no API key: it has characters that no request can bring to the server.")

    def _change(self, event: ValueChangeEventArguments[bool]) -> None:
        if not event.value:
            self._end("")

    def _end(self, key: str) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.set_result(key)

    def _leave(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
