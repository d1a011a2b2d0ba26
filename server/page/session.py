"""One tab's session: its key, and the server's models and capabilities."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from server.client.openai_answers import Chunk
from server.page.api import Api, ApiError, can_be_sent
from server.page.browser import Browser, StoredState
from server.page.capabilities import Capabilities, Fields, has_fields

_CHAT = "/chat/completions"
T = TypeVar("T")


class Session:
    """The session of one tab."""

    def __init__(self, api: Api, browser: Browser, ask_key: Callable[[str], Awaitable[str]]) -> None:
        """`ask_key` shows the reason that it is given and returns the user's key, empty for none."""
        self.api = api
        self.browser = browser
        self.stored = StoredState()
        self.key = ""
        self.models: list[str] = []
        self.model = ""
        self.capabilities: Capabilities | None = None
        """None if the server has no /v1/capabilities."""
        self.pictures: dict[str, str] = {}
        """Data URLs of the tab's pictures, by id. The browser has more, which it sends when they are needed."""
        self._ask_key = ask_key

    @property
    def fields(self) -> Fields:
        """The server's description of chat request fields; empty if it has none."""
        return {} if self.capabilities is None else self.capabilities.endpoints.get(f"/v1{_CHAT}", {})

    def has_field(self, name: str) -> bool:
        """Whether the server supports this field."""
        return has_fields(self.fields, [name])

    async def open(self) -> None:
        """Load the browser's stored state and the server's models and capabilities. Raises ApiError."""
        self.stored = await self.browser.begin()
        if can_be_sent(self.stored.key):
            self.key = self.stored.key
        self.models = await self.with_key(self.api.models)
        self.capabilities = await self.with_key(self.api.capabilities)
        if self.model not in self.models:
            self.model = self.models[0] if self.models else ""

    async def with_key(self, call: Callable[[str], Awaitable[T]]) -> T:
        """Call with the key. If the server refuses it, ask for another key and retry. Raises ApiError."""
        while True:
            key = self.key
            try:
                return await call(key)
            except ApiError as problem:
                if not problem.wants_key:
                    raise
                if key == self.key and not await self._renew_key(str(problem)):
                    raise

    async def stream_chat(self, body: Mapping[str, Any], on_chunk: Callable[[Chunk, float], object]) -> None:
        """Stream a chat completion; `on_chunk` receives each chunk and the seconds since the request.

        Aborts the request if `on_chunk` returns True. Raises ApiError.
        """

        async def stream(key: str) -> None:
            started = time.monotonic()
            async with self.api.stream(_CHAT, body, key) as chunks:
                async for chunk in chunks:
                    if on_chunk(chunk, time.monotonic() - started) is True:
                        return

        await self.with_key(stream)

    async def _renew_key(self, reason: str) -> bool:
        key = await self._ask_key(reason)
        if key:
            self.key = key
            self.browser.remember_key(key)
        return bool(key)
