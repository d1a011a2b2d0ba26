"""What is kept in the browser: conversations and settings for good, the API key as long as its tab is open."""

import contextlib
import json
from typing import Any

import msgspec
from nicegui import Client
from nicegui.element import Element

_ANSWER_S = 10.0
_MOST_LISTED = 200
_MOST_KEPT = 10_000_000
"""UTF-16 units of a conversation, more than browsers keep for all of them."""


class Listed(msgspec.Struct):
    """A conversation in the list of them."""

    id: str
    title: str
    updated: float
    """Unix time in seconds."""


class Memory(msgspec.Struct):
    """What was there when the page was opened."""

    conversations: list[Listed] = []
    key: str = ""
    current: str | None = None
    """The conversation that this tab showed last."""
    theme: str | None = None
    settings: dict[str, Any] | None = None
    system: str | None = None


class Browser:
    """The store of one tab; tabs of one address share all but the key."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def begin(self) -> Memory:
        """All but the conversations themselves."""
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
        """Whether there was room for it."""
        return await self._call("save", conversation_id, text) is True

    def save_soon(self, conversation_id: str, text: str) -> None:
        """The same, without asking whether there was room."""
        self._send("save", conversation_id, text)

    def remove(self, conversation_id: str) -> None:
        self._send("remove", conversation_id)

    def remember(self, name: str, value: Any) -> None:
        """Where `Memory` has it when the page is opened again."""
        self._send("remember", name, value)

    def remember_key(self, key: str) -> None:
        """Until the tab is closed; empty forgets it."""
        self._send("rememberKey", key)

    def look(self, conversation_id: str) -> None:
        """The tab shows this conversation now."""
        self._send("look", conversation_id)

    def copy(self, text: str) -> None:
        """To the clipboard."""
        self._send("copy", text)

    def focus(self, element: Element) -> None:
        """Whoever types goes on there."""
        self._client.run_javascript(f"getHtmlElement({element.id})?.focus()")

    def follow(self) -> None:
        """Keep the end of the log in sight while it grows."""
        self._send("follow")

    def to_end(self) -> None:
        """Of the log."""
        self._send("toEnd")

    def _send(self, function: str, *arguments: Any) -> None:
        self._client.run_javascript(_call_of(function, arguments))

    async def _call(self, function: str, *arguments: Any) -> Any:
        return await self._client.run_javascript(_call_of(function, arguments), timeout=_ANSWER_S)


def remembered(found: Any) -> Memory:
    """What the browser's script says at first. What cannot be read, each by itself, is as if it were not there."""
    memory = Memory()
    for field in msgspec.structs.fields(Memory):
        with contextlib.suppress(msgspec.ValidationError, KeyError, TypeError):
            setattr(memory, field.name, msgspec.convert(found[field.name], field.type))
    return memory


def listed(found: Any) -> list[Listed]:
    """What the browser's script says of its conversations: the last used ones."""
    try:
        return msgspec.convert(found, list[Listed])[:_MOST_LISTED]
    except msgspec.ValidationError:
        return []


def _call_of(function: str, arguments: tuple[Any, ...]) -> str:
    return f"window.samewise.{function}({', '.join(json.dumps(argument) for argument in arguments)})"
