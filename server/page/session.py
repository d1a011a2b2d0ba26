"""What one tab knows: its key, and the server's models and abilities."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from server.page.api import Api, ApiError, can_be_sent
from server.page.browser import Browser, Memory
from server.page.described import Capabilities, Fields
from server.page.parameters.catalog import has_fields

CHAT = "/v1/chat/completions"
T = TypeVar("T")


class Session:
    """Of one tab."""

    def __init__(self, api: Api, browser: Browser, ask_key: Callable[[str], Awaitable[str]]) -> None:
        """`ask_key` shows why a key is needed and returns one, empty if there is none."""
        self.api = api
        self.browser = browser
        self.memory = Memory()
        self.key = ""
        self.models: list[str] = []
        self.model = ""
        self.capabilities: Capabilities | None = None
        """None for servers that do not tell."""
        self._ask_key = ask_key

    @property
    def fields(self) -> Fields:
        """What the server says of the fields of a chat request; empty where it says nothing."""
        return {} if self.capabilities is None else self.capabilities.endpoints.get(CHAT, {})

    def has_field(self, name: str) -> bool:
        """Whether the server does something with this field; see `catalog.has_fields`."""
        return has_fields(self.fields, [name])

    async def open(self) -> None:
        """Ask browser and server what there is. Raises ApiError."""
        self.memory = await self.browser.begin()
        if can_be_sent(self.memory.key):
            self.key = self.memory.key
        await self.look()

    async def look(self) -> None:
        """Ask the server what it has. Raises ApiError."""
        self.models = await self.with_key(self.api.models)
        self.capabilities = await self.with_key(self.api.capabilities)
        if self.model not in self.models:
            self.model = self.models[0] if self.models else ""

    async def with_key(self, call: Callable[[str], Awaitable[T]]) -> T:
        """What the call returns, which is given the key, and another one until the server takes it.

        Raises ApiError, also if there is no other key.
        """
        while True:
            key = self.key
            try:
                return await call(key)
            except ApiError as problem:
                if not problem.wants_key:
                    raise
                if key == self.key and not await self._renew_key(str(problem)):
                    raise

    async def _renew_key(self, reason: str) -> bool:
        """Ask for another key; whether there is one."""
        key = await self._ask_key(reason)
        if key:
            self.key = key
            self.browser.remember_key(key)
        return bool(key)
