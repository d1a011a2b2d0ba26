"""How many pages there are at a time, and how fast they are made. Pure ASGI."""

from collections import Counter

from nicegui import Client
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.page.pacing import Turns, origin_of

MOST_PAGES = 256
"""At a time, including those that were loaded within the last minute and never shown: each takes memory and time that
answers need, too."""
MOST_PAGES_OF_ORIGIN = MOST_PAGES // 2
"""So that no address can keep all others out."""


class Room:
    """Makes pages in turns while there is room for them. All other requests pass."""

    def __init__(self, app: ASGIApp, turns: Turns, path: str) -> None:
        self._app = app
        self._turns = turns
        self._path = path
        self._waiting: Counter[str] = Counter()
        """Pages that are being made, by origin."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != self._path:
            await self._app(scope, receive, send)
        elif self._has_room(origin := origin_of(scope)):
            self._waiting[origin] += 1
            try:
                messages = await self._made(scope, receive, origin)
            finally:
                self._waiting -= Counter({origin: 1})
            for message in messages:
                await send(message)
        else:
            text = "Too many pages are open. Try again in a minute."
            await PlainTextResponse(text, 503, {"Retry-After": "60"})(scope, receive, send)

    def _has_room(self, origin: str) -> bool:
        pages = Counter(origin_of(client.request.scope) for client in Client.instances.values()) + self._waiting
        return pages.total() < MOST_PAGES and pages[origin] < MOST_PAGES_OF_ORIGIN

    async def _made(self, scope: Scope, receive: Receive, origin: str) -> list[Message]:
        """The whole answer: sent during the turn, it would make others wait for whoever reads it."""
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        async with self._turns.turn(origin):
            await self._app(scope, receive, keep)
        return messages
