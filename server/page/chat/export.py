"""Conversations as files."""

import re
from typing import TYPE_CHECKING

from nicegui import ui

if TYPE_CHECKING:
    from server.page.chat.view import ChatView


class ExportMenu:
    """Markdown to read, JSON to go on with in a request."""

    def __init__(self, chat: "ChatView") -> None:
        self._chat = chat
        self._button = ui.button(icon="download").props('flat round dense aria-label="Export" aria-haspopup=menu')
        self._button.move(target_index=0)
        with self._button, ui.menu().props("role=menu"):
            ui.menu_item("Markdown", self._markdown).props("role=menuitem")
            ui.menu_item("Request as JSON", self._request).props("role=menuitem")

    def set_visibility(self, visible: bool) -> None:
        self._button.set_visibility(visible)

    def _markdown(self) -> None:
        ui.download.content(self._chat.conversation.to_markdown(), f"{self._name}.md", "text/markdown")

    def _request(self) -> None:
        body = self._chat.conversation.to_messages(self._chat.settings.request)
        ui.download.content(body, f"{self._name}.json", "application/json")

    @property
    def _name(self) -> str:
        return re.sub(r"[^\w-]+", "-", self._chat.conversation.title).strip("-").lower() or "conversation"
