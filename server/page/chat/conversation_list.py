"""All conversations of this browser, the last used first."""

from functools import partial

from nicegui import ui
from nicegui.events import GenericEventArguments

from server.page.browser import Listed, listed
from server.page.chat.view import ChatView
from server.page.session import Session


class ConversationList:
    """Opens, begins and removes them."""

    def __init__(self, session: Session, chat: ChatView) -> None:
        self._session = session
        self._chat = chat
        self._shown: tuple[list[tuple[str, str]], str] | None = None
        with ui.element("nav").classes("panel").props('aria-label="Conversations"'):
            self._new = ui.button("New chat", icon="add", on_click=self._begin).props("no-caps outline")
            self._new.classes("wide")
            self._list = ui.element("ul").classes("conversations")
        ui.on("conversations", self._on_change)
        chat.keeper.on_saved(self._look)
        self._show(session.memory.conversations)

    async def _on_change(self, event: GenericEventArguments) -> None:
        """Another tab has written a conversation."""
        conversations, changed = event.args
        self._show(listed(conversations))
        if isinstance(changed, str):
            await self._chat.note_change(changed)

    async def _look(self) -> None:
        self._show(await self._session.browser.conversations())

    def _show(self, conversations: list[Listed]) -> None:
        shown = ([(one.id, one.title) for one in conversations], self._chat.conversation.id)
        if shown == self._shown:
            return
        self._shown = shown
        self._list.clear()
        with self._list:
            for one in conversations:
                self._entry(one)

    def _entry(self, one: Listed) -> None:
        title = one.title or "Conversation"
        current = "true" if one.id == self._chat.conversation.id else "false"
        with ui.element("li"):
            open_ = ui.button(title, on_click=partial(self._open, one.id)).props("flat no-caps align=left dense")
            open_.classes("open").props(f"aria-current={current}")
            remove = ui.button(icon="delete", on_click=partial(self._remove, one.id)).props("flat round dense size=sm")
            remove.props["aria-label"] = f"Delete {title}"

    async def _begin(self) -> None:
        self._chat.begin()
        await self._look()

    async def _open(self, conversation_id: str) -> None:
        await self._chat.open(conversation_id)
        await self._look()

    async def _remove(self, conversation_id: str) -> None:
        self._chat.forget(conversation_id)
        await self._look()
        self._session.browser.focus(self._new)  # the button that had it is gone
