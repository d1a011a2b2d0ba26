"""All conversations of this browser, the last used first."""

from functools import partial

from nicegui import ui

from server.page.browser import Listed, listed
from server.page.chat.view import ChatView
from server.page.session import Session


class ConversationList:
    """Opens, begins and removes them."""

    def __init__(self, session: Session, chat: ChatView) -> None:
        self._session = session
        self._chat = chat
        with ui.element("nav").classes("panel").props('aria-label="Conversations"'):
            new = ui.button("New chat", icon="add", on_click=chat.begin).props("no-caps outline")
            new.classes("wide")
            self._list = ui.element("ul").classes("conversations")
        ui.on("conversations", lambda event: self._show(listed(event.args)))
        chat.on_saved(self._look)
        self._show(session.memory.conversations)

    async def _look(self) -> None:
        self._show(await self._session.browser.conversations())

    def _show(self, conversations: list[Listed]) -> None:
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

    async def _open(self, conversation_id: str) -> None:
        await self._chat.open(conversation_id)
        await self._look()

    async def _remove(self, conversation_id: str) -> None:
        self._session.browser.remove(conversation_id)
        if self._chat.conversation.id == conversation_id:
            self._chat.begin()
        await self._look()
