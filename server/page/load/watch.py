"""One reading a second for all who look at a server, and none while nobody does."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from server.page.api import Api
from server.page.load.reader import Reader
from server.page.load.reading import Reading

INTERVAL_S = 1.0
_FAILED = "The page has failed to read this, and its log tells why. Choose this view again to retry."
_log = logging.getLogger("samewise.page")
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
            watch = self._watches[key] = _Watch(Reader(self._api, key), lambda: self._watches.pop(key, None))
        watch.add(looker)

        def end() -> None:
            if watch.remove(looker) and self._watches.get(key) is watch:
                del self._watches[key]

        return end


class _Watch:
    def __init__(self, reader: Reader, on_failure: Callable[[], object]) -> None:
        self._on_failure = on_failure
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
        try:
            await self._read_again_and_again()
        except Exception:  # noqa: BLE001  (a bug, after which whoever looks next gets a new one)
            _log.exception("The page cannot watch the server")
            self._on_failure()
            self._tell(msgspec.to_builtins(Reading(problem=_FAILED)))

    def _tell(self, reading: dict[str, Any]) -> None:
        self._latest = reading
        for looker in tuple(self._lookers):
            try:
                looker(reading)
            except Exception:  # noqa: BLE001  (the others look on)
                _log.exception("The page cannot show the server's load")

    async def _read_again_and_again(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            self._tell(msgspec.to_builtins(await self._reader.read()))
            await asyncio.sleep(started + INTERVAL_S - loop.time())
