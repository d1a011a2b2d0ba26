"""What the browser keeps: conversations and settings for good, the API key until its tab is closed."""

import contextlib
import json
import time
from collections.abc import Awaitable, Callable
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
"""UTF-16 units of a conversation; browsers keep fewer for all of them."""


class Listed(msgspec.Struct):
    """An entry of the list of conversations."""

    id: str
    title: str
    updated: float
    """Unix time in seconds."""


class Memory(msgspec.Struct):
    """What the browser remembered when the page was opened."""

    conversations: list[Listed] = []
    key: str = ""
    current: str | None = None
    """The conversation that this tab showed last."""
    theme: str | None = None
    settings: dict[str, Any] | None = None
    system: str | None = None


class Browser:
    """The store of one tab. Tabs of one address share everything except the key."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def begin(self) -> Memory:
        """Everything except the conversations themselves."""
        return remembered(await self._call("begin"))

    async def conversations(self) -> list[Listed]:
        """The last used first."""
        return listed(await self._call("conversations"))

    async def load(self, conversation_id: str) -> str | None:
        """A conversation's JSON; None if it is gone. Raises TimeoutError if the browser does not answer."""
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
        """Save without waiting for whether there was room."""
        self._send("save", conversation_id, text)

    def remove(self, conversation_id: str) -> None:
        self._send("remove", conversation_id)

    def remember(self, name: str, value: Any) -> None:
        """Keep a field of `Memory`."""
        self._send("remember", name, value)

    def remember_key(self, key: str) -> None:
        """Keep the key until the tab is closed; "" deletes it."""
        self._send("rememberKey", key)

    def look(self, conversation_id: str) -> None:
        """Remember that the tab shows this conversation."""
        self._send("look", conversation_id)

    def copy(self, text: str) -> None:
        """Copy to the clipboard."""
        self._send("copy", text)

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


def remembered(found: Any) -> Memory:
    """Read the script's first answer. Each field that cannot be read keeps its default."""
    memory = Memory()
    for field in msgspec.structs.fields(Memory):
        with contextlib.suppress(msgspec.ValidationError, KeyError, TypeError):
            setattr(memory, field.name, msgspec.convert(found[field.name], field.type))
    return memory


def listed(found: Any) -> list[Listed]:
    """Read the script's list of conversations, of which only the last used ones are shown."""
    try:
        return msgspec.convert(found, list[Listed])[:_MOST_LISTED]
    except msgspec.ValidationError:
        return []


def _call_of(function: str, arguments: tuple[Any, ...]) -> str:
    return f"window.samewise.{function}({', '.join(json.dumps(argument) for argument in arguments)})"


class _Recent(dict[str, None]):
    """The last ids of conversations, because browsers can name any number of them."""

    def add(self, conversation_id: str) -> None:
        if len(conversation_id) <= _ID_LENGTH:
            self.discard(conversation_id)
            self[conversation_id] = None
        if len(self) > _MOST_RECENT:
            del self[next(iter(self))]

    def discard(self, conversation_id: str) -> None:
        self.pop(conversation_id, None)


class Keeper:
    """Keeps one tab's conversations in the browser, whose tabs may all write the same one."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._on_saved: list[Callable[[], Awaitable[None]]] = []
        self._forgotten = _Recent()
        self._written_elsewhere = _Recent()
        """Conversations that another tab has written since this one read or wrote them."""

    def on_saved(self, handler: Callable[[], Awaitable[None]]) -> None:
        """Have the handler called after each conversation that was saved."""
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
        """Save it with what another tab has added meanwhile; returns whether there was room for it."""
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
        """Save a growing conversation without waiting, unless another tab writes it, too."""
        if conversation.id not in self._forgotten and conversation.id not in self._written_elsewhere:
            self._browser.save_soon(conversation.id, conversation.to_json())

    def note_change(self, conversation_id: str) -> None:
        """Note that another tab has written it."""
        self._written_elsewhere.add(conversation_id)

    def forget(self, conversation_id: str) -> None:
        """Delete it, and do not save it again while parts of it still come."""
        self._forgotten.add(conversation_id)
        self._browser.remove(conversation_id)
