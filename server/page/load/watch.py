"""One reading a second for all who look at a server, and none while nobody does."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from server.page.api import Api
from server.page.load.reader import Reader

INTERVAL_S = 1.0
Looker = Callable[[dict[str, Any]], None]


class Watches:
    """Of one server. Pages with the same key share what is read; with another, one may see other requests."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._watches: dict[str, _Watch] = {}

    def look(self, key: str, looker: Looker) -> Callable[[], None]:
        """Have the looker called with each reading, as plain data that is not to be changed; returns what ends that."""
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = _Watch(Reader(self._api, key))
        watch.add(looker)

        def end() -> None:
            if watch.remove(looker) and self._watches.get(key) is watch:
                del self._watches[key]

        return end


class _Watch:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lookers: list[Looker] = []
        self._latest: dict[str, Any] | None = None
        self._task = asyncio.create_task(self._run(), name="watch the server")

    def add(self, looker: Looker) -> None:
        self._lookers.append(looker)
        if self._latest is not None:
            looker(self._latest)

    def remove(self, looker: Looker) -> bool:
        """Whether nobody looks any more, which ends it."""
        if looker in self._lookers:
            self._lookers.remove(looker)
        if not self._lookers:
            self._task.cancel()
        return not self._lookers

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            self._latest = msgspec.to_builtins(await self._reader.read())
            for looker in tuple(self._lookers):
                looker(self._latest)
            await asyncio.sleep(started + INTERVAL_S - loop.time())
