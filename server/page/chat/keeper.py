"""Keeps conversations in the browser, whose tabs may all write the same one."""

import contextlib
import time
from collections.abc import Awaitable, Callable

from server.page.browser import Browser
from server.page.conversation import Conversation

_MOST_RECENT = 200
_ID_LENGTH = 64


class _Recent(dict[str, None]):
    """Ids of conversations, only the last ones, because browsers can name any number of them."""

    def add(self, conversation_id: str) -> None:
        if len(conversation_id) <= _ID_LENGTH:
            self.discard(conversation_id)
            self[conversation_id] = None
        if len(self) > _MOST_RECENT:
            del self[next(iter(self))]

    def discard(self, conversation_id: str) -> None:
        self.pop(conversation_id, None)


class Keeper:
    """Of one tab."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._on_saved: list[Callable[[], Awaitable[None]]] = []
        self._forgotten = _Recent()
        self._written_elsewhere = _Recent()
        """By another tab, since this one read or wrote them."""

    def on_saved(self, handler: Callable[[], Awaitable[None]]) -> None:
        """Called whenever a conversation was kept."""
        self._on_saved.append(handler)

    async def load(self, conversation_id: str) -> Conversation:
        """Raises ValueError if it is gone, or cannot be read."""
        self._written_elsewhere.discard(conversation_id)
        try:
            text = await self._browser.load(conversation_id)
        except TimeoutError:
            raise ValueError("the browser does not answer") from None
        return Conversation.from_json(text or "")

    async def save(self, conversation: Conversation) -> bool:
        """Whether there was room for it. What another tab has added meanwhile is added to it first."""
        if conversation.id in self._forgotten:
            return True
        if conversation.id in self._written_elsewhere:
            with contextlib.suppress(ValueError):  # gone, or broken: this one is whole
                conversation.merge(await self.load(conversation.id))
        conversation.updated = time.time()
        has_room = await self._browser.save(conversation.id, conversation.to_json())
        for handler in self._on_saved:
            await handler()
        return has_room

    def save_meanwhile(self, conversation: Conversation) -> None:
        """What there is of it so far, without waiting; unless another tab writes it, too."""
        if conversation.id not in self._forgotten and conversation.id not in self._written_elsewhere:
            self._browser.save_soon(conversation.id, conversation.to_json())

    def note_change(self, conversation_id: str) -> None:
        """Another tab has written it."""
        self._written_elsewhere.add(conversation_id)

    def forget(self, conversation_id: str) -> None:
        """For good, whatever is still being written of it."""
        self._forgotten.add(conversation_id)
        self._browser.remove(conversation_id)
