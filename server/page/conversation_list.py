"""The list of this browser's conversations, most recently used first."""

from collections.abc import Awaitable, Callable

from nicegui import ui
from nicegui.events import GenericEventArguments

from server.page.browser import ConversationEntry, parse_list
from server.page.chat import ChatView
from server.page.elements import icon_button, name_button
from server.page.session import Session


class ConversationList:
    """The drawer's list, which opens, creates and deletes conversations."""

    def __init__(self, session: Session, chat: ChatView) -> None:
        self._session = session
        self._chat = chat
        self._rows: list[_Row] = []
        with ui.element("nav").classes("panel").props('aria-label="Conversations"'):
            self._new = ui.button("New chat", icon="add", on_click=self._begin).props("no-caps outline")
            self._new.classes("wide")
            self._list = ui.element("ul").classes("conversations")
        ui.on("conversations", self._on_change)
        chat.store.on_saved(self._reload)
        self._show(session.stored.conversations)

    async def _on_change(self, event: GenericEventArguments) -> None:
        """Handle that another tab has written a conversation."""
        conversations, changed = event.args
        self._show(parse_list(conversations))
        if isinstance(changed, str):
            await self._chat.note_change(changed)

    async def _reload(self) -> None:
        self._show(await self._session.browser.conversations())

    def _show(self, conversations: list[ConversationEntry]) -> None:
        for row in self._rows[len(conversations) :]:
            row.delete()
        del self._rows[len(conversations) :]
        with self._list:
            while len(self._rows) < len(conversations):
                self._rows.append(_Row(self._open, self._remove))
        for row, one in zip(self._rows, conversations, strict=True):
            row.show(one, is_current=one.id == self._chat.conversation.id)

    async def _begin(self) -> None:
        self._chat.begin()
        await self._reload()

    async def _open(self, conversation_id: str) -> None:
        await self._chat.open(conversation_id)
        await self._reload()

    async def _remove(self, conversation_id: str) -> None:
        self._chat.forget(conversation_id)
        await self._reload()
        self._session.browser.focus(self._new)  # the deleted button had the focus


class _Row:
    """A row of the list, reused for other conversations because creating elements is slow."""

    def __init__(self, on_open: Callable[[str], Awaitable[None]], on_remove: Callable[[str], Awaitable[None]]) -> None:
        self._shown: tuple[str, str, bool] | None = None
        self._id = ""
        with ui.element("li") as self._element:
            self._open = ui.button(on_click=lambda: on_open(self._id)).props("flat no-caps align=left dense")
            self._open.classes("open")
            self._remove = icon_button("delete", "Delete", lambda: on_remove(self._id), small=True)

    def show(self, one: ConversationEntry, is_current: bool) -> None:
        shown = one.id, one.title or "Conversation", is_current
        if shown == self._shown:
            return
        self._shown = shown
        self._id, title, _ = shown
        self._open.set_text(title)
        self._open.props["aria-current"] = "true" if is_current else "false"
        name_button(self._remove, f"Delete {title}")

    def delete(self) -> None:
        self._element.delete()
