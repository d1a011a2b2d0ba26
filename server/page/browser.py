"""The browser's storage: conversations and settings are permanent; the API key lasts until its tab is closed."""

import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from nicegui import Client
from nicegui.element import Element

from server.page.conversation import Conversation

_MOST_RECENT = 200
_ID_LENGTH = 64
_ANSWER_S = 10.0
_MOST_LISTED = 200
_MOST_KEPT = 10_000_000
"""UTF-16 units of a conversation; browsers store less than this in total."""


class ConversationEntry(msgspec.Struct):
    """A conversation's entry in the list."""

    id: str
    title: str
    updated: float
    """Unix time in seconds."""


class StoredState(msgspec.Struct):
    """The browser's stored state when the page was opened."""

    conversations: list[ConversationEntry] = []
    key: str = ""
    current: str | None = None
    """The conversation that this tab showed last."""
    theme: str | None = None
    settings: dict[str, Any] | None = None
    system: str | None = None


class Browser:
    """Access to one tab's storage. Tabs with the same address share everything except the key."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def begin(self) -> StoredState:
        """Load everything except the conversations' contents."""
        return parse_state(await self._call("begin"))

    async def conversations(self) -> list[ConversationEntry]:
        """List the conversations, most recently used first."""
        return parse_list(await self._call("conversations"))

    async def load(self, conversation_id: str) -> str | None:
        """A conversation's JSON; None if it was deleted. Raises TimeoutError if the browser does not answer."""
        parts: list[str] = []
        length = 0
        while length < _MOST_KEPT:
            part = await self._call("load", conversation_id, length)
            if not isinstance(part, str):
                return None
            if not part:
                return "".join(parts)
            parts.append(part)
            length += len(part.encode("utf-16-le")) // 2  # as JavaScript counts
        return None

    async def save(self, conversation_id: str, text: str) -> bool:
        """Save a conversation; returns whether there was room for it."""
        return await self._call("save", conversation_id, text) is True

    def save_soon(self, conversation_id: str, text: str) -> None:
        """Save a conversation without waiting for the result."""
        self._send("save", conversation_id, text)

    def remove(self, conversation_id: str) -> None:
        self._send("remove", conversation_id)

    def remember(self, name: str, value: Any) -> None:
        """Store a field of `StoredState`."""
        self._send("remember", name, value)

    def remember_key(self, key: str) -> None:
        """Store the key until the tab is closed; "" deletes it."""
        self._send("rememberKey", key)

    def set_current(self, conversation_id: str) -> None:
        """Remember that the tab shows this conversation."""
        self._send("setCurrent", conversation_id)

    def copy(self, text: str) -> None:
        """Copy text to the clipboard."""
        self._send("copy", text)

    def show_picture(self, element: Element, picture_id: str) -> None:
        """Show a picture that the browser has in an `img`."""
        self._send("showPicture", element.id, picture_id)

    def remove_picture(self, picture_id: str) -> None:
        """Delete a picture."""
        self._send("removePicture", picture_id)

    def ask_for_pictures(self, element: Element, picture_ids: Sequence[str]) -> None:
        """Raise the event `wanted` at an element, with the ids of pictures that it shall send."""
        self._send("askForPictures", element.id, list(picture_ids))

    def focus(self, element: Element) -> None:
        self._client.run_javascript(f"getHtmlElement({element.id})?.focus()")

    def follow(self) -> None:
        """Keep the end of the log visible while it grows."""
        self._send("follow")

    def to_end(self) -> None:
        """Scroll to the end of the log."""
        self._send("toEnd")

    def _send(self, function: str, *arguments: Any) -> None:
        self._client.run_javascript(_call_of(function, arguments))

    async def _call(self, function: str, *arguments: Any) -> Any:
        return await self._client.run_javascript(_call_of(function, arguments), timeout=_ANSWER_S)


def parse_state(found: Any) -> StoredState:
    """Read the browser's stored state. A field that cannot be read keeps its default."""
    state = StoredState()
    for field in msgspec.structs.fields(StoredState):
        with contextlib.suppress(msgspec.ValidationError, KeyError, TypeError):
            setattr(state, field.name, msgspec.convert(found[field.name], field.type))
    return state


def parse_list(found: Any) -> list[ConversationEntry]:
    """Read the browser's list of conversations, limited to the most recently used ones."""
    try:
        return msgspec.convert(found, list[ConversationEntry])[:_MOST_LISTED]
    except msgspec.ValidationError:
        return []


def _call_of(function: str, arguments: tuple[Any, ...]) -> str:
    return f"window.samewise.{function}({', '.join(json.dumps(argument) for argument in arguments)})"


class _Recent(dict[str, None]):
    """The most recent conversation ids, bounded because browsers can send any number of them."""

    def add(self, conversation_id: str) -> None:
        if len(conversation_id) <= _ID_LENGTH:
            self.discard(conversation_id)
            self[conversation_id] = None
        if len(self) > _MOST_RECENT:
            del self[next(iter(self))]

    def discard(self, conversation_id: str) -> None:
        self.pop(conversation_id, None)


class ConversationStore:
    """Loads and saves one tab's conversations. Other tabs may write the same conversation."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._on_saved: list[Callable[[], Awaitable[None]]] = []
        self._forgotten = _Recent()
        self._written_elsewhere = _Recent()
        """Conversations that another tab has written since this one read or wrote them."""

    def on_saved(self, handler: Callable[[], Awaitable[None]]) -> None:
        """Call the handler after each save."""
        self._on_saved.append(handler)

    async def load(self, conversation_id: str) -> Conversation:
        """Load a conversation. Raises ValueError if it was deleted or cannot be read."""
        self._written_elsewhere.discard(conversation_id)
        try:
            text = await self._browser.load(conversation_id)
        except TimeoutError:
            raise ValueError("the browser does not answer") from None
        return Conversation.from_json(text or "")

    async def save(self, conversation: Conversation) -> bool:
        """Merge turns that another tab added, then save; returns whether there was room for it."""
        if conversation.id in self._forgotten:
            return True
        if conversation.id in self._written_elsewhere:
            with contextlib.suppress(ValueError):  # deleted or unreadable: this tab's version replaces it
                conversation.merge(await self.load(conversation.id))
        conversation.updated = time.time()
        has_room = await self._browser.save(conversation.id, conversation.to_json())
        for handler in self._on_saved:
            await handler()
        return has_room

    def save_meanwhile(self, conversation: Conversation) -> None:
        """Save a growing conversation without waiting, unless another tab has written it, too."""
        if conversation.id not in self._forgotten and conversation.id not in self._written_elsewhere:
            self._browser.save_soon(conversation.id, conversation.to_json())

    def note_change(self, conversation_id: str) -> None:
        """Note that another tab has written this conversation."""
        self._written_elsewhere.add(conversation_id)

    def forget(self, conversation_id: str) -> None:
        """Delete a conversation, and do not save it again if its answer is still being streamed."""
        self._forgotten.add(conversation_id)
        self._browser.remove(conversation_id)
