"""One tab's session: its key, and the server's models and capabilities."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from server.client.openai_answers import Chunk
from server.page.api import Api, ApiError, can_be_sent
from server.page.browser import Browser, StoredState
from server.page.capabilities import Capabilities, Fields, has_fields
from server.page.models import ModelCard, are_several

_CHAT = "/chat/completions"
_UNAVAILABLE = 503
T = TypeVar("T")


class Session:
    """The session of one tab."""

    def __init__(self, api: Api, browser: Browser, ask_key: Callable[[str], Awaitable[str]]) -> None:
        """`ask_key` shows the reason that it is given and returns the user's key, empty for none."""
        self.api = api
        self.browser = browser
        self.stored = StoredState()
        self.key = ""
        self.models: list[ModelCard] = []
        self.model = ""
        self.capabilities: Capabilities | None = None
        """The chosen model's; None if the server has no /v1/capabilities, or cannot tell before the model is loaded."""
        self._are_known = True
        self._listeners: list[Callable[[], None]] = []
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
        if self.card is None:
            first = next((card for card in self.models if card.is_loaded), next(iter(self.models), None))
            self.model = "" if first is None else first.id
        await self._read_capabilities()

    @property
    def has_several(self) -> bool:
        """Whether the server has more than one model."""
        return are_several(self.models)

    @property
    def card(self) -> ModelCard | None:
        """The chosen model; None if the server lists none of that name."""
        return next((card for card in self.models if card.id == self.model), None)

    def on_model(self, listener: Callable[[], None]) -> None:
        """Call this when another model is chosen, and when more becomes known of the chosen one."""
        self._listeners.append(listener)

    async def choose(self, model: str) -> None:
        """Use this model from now on. Raises ApiError."""
        self.model = model
        try:
            await self._read_capabilities()
        finally:
            self._tell()

    async def refresh(self) -> None:
        """Read the models' states again. Raises ApiError."""
        self.models = await self.api.models(self.key)
        if not self._are_known and self.card is not None and self.card.is_loaded:
            await self._read_capabilities()
            self._tell()

    async def load_model(self) -> None:
        """Have the chosen model loaded; returns when it is. Raises ApiError."""
        model = self.model
        await self.with_key(lambda key: self.api.load(model, key))

    async def _read_capabilities(self) -> None:
        model = self.model
        several = self.has_several
        found, are_known = None, True
        try:
            found = await self.with_key(lambda key: self.api.capabilities(key, model if several else None))
        except ApiError as problem:
            if problem.status != _UNAVAILABLE or not several:
                raise
            are_known = False
        if model == self.model:  # another one may have been chosen meanwhile
            self.capabilities, self._are_known = found, are_known

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

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
