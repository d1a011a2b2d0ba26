"""Counting what is used within a minute or a day, here or in a Redis that several servers share."""

import logging
import time
from dataclasses import dataclass
from typing import Literal

from limits.aio.storage import MemoryStorage, RedisStorage, Storage
from limits.errors import StorageError
from limits.storage import storage_from_string

MINUTE_S, DAY_S = 60, 86400
_GIVE_UP_S = 2.0
"""For an answer of Redis."""
_TRY_AGAIN_S = 5.0
"""After one that did not come."""
_logger = logging.getLogger("samewise.limits")
_REDIS_FORM = "It is written as redis://[:password@]host:port[/number], and needs `pip install 'samewise[redis]'`."
Unit = Literal["requests", "tokens"]


@dataclass(frozen=True, slots=True)
class Window:
    """What is counted, and how much there may be of it in how long."""

    name: str
    """Of what, and whose."""
    unit: Unit
    limit: int
    seconds: int
    """Windows begin at multiples of it, in Unix time."""
    slides: bool
    """Whether what was used in the window before this one still counts, by the part of it that is not so long ago."""


@dataclass(frozen=True, slots=True)
class Count:
    """How things stand with a window."""

    window: Window
    before: int
    """Used in the window before this one, if that counts, ..."""
    now: int
    """... and in this one."""
    elapsed: float
    """Seconds of this one that have passed."""

    @property
    def used(self) -> float:
        """That counts now."""
        return self.before * (1 - self.elapsed / self.window.seconds) + self.now

    @property
    def remaining(self) -> int:
        return max(0, int(self.window.limit - self.used))

    @property
    def reset_s(self) -> float:
        """Until all of it is there again, if nothing more is used."""
        to_next = self.window.seconds - self.elapsed
        if self.now and self.window.slides:
            return to_next + self.window.seconds
        return to_next if self.now or self.before else 0.0

    def wait_s(self, cost: int) -> float:
        """Until so much more may be used, which is at most the limit, if nothing else is."""
        room, seconds = self.window.limit - cost, self.window.seconds
        to_next = seconds - self.elapsed
        if self.used <= room:
            return 0.0
        if self.now > room and self.window.slides:  # this one must go out of sight, too
            return to_next + seconds * (1 - room / self.now)
        if self.now > room:
            return to_next
        return seconds * (1 - (room - self.now) / self.before) - self.elapsed


@dataclass(frozen=True, slots=True)
class Taken:
    """What was counted, so that it can be corrected."""

    window: Window
    cost: int
    key: str
    storage: Storage


class Windows:
    """The counters. While a shared one does not answer, those of this server alone count, and the log says so."""

    def __init__(self, url: str | None = None) -> None:
        """`url` is that of a Redis.

        Raises ValueError if the URL is none, or what it takes to use it is not installed.
        """
        self._own: Storage = MemoryStorage()
        self._shared = None if url is None else _redis(url)
        self._lost_until = 0.0
        """When the shared one is asked again; 0 while it answers."""

    def now(self) -> float:
        """Unix time in seconds."""
        return time.time()

    async def take(self, window: Window, cost: int, least: int | None = None) -> tuple[Count, Taken | None]:
        """Use so much of a window, or as much as there is if that is not less than `least`; else there is no Taken.

        Of several that ask at the same time none gets what is not there.
        """
        count, taken = await self._take_from_either(window, cost)
        if taken is None and least is not None and least <= count.remaining < cost:
            return await self._take_from_either(window, count.remaining)
        return count, taken

    async def _take_from_either(self, window: Window, cost: int) -> tuple[Count, Taken | None]:
        storage = self._storage()
        try:
            taken = await self._take(storage, window, cost)
        except StorageError as error:
            self._lose(error)
            return await self._take(self._own, window, cost)
        if storage is self._shared:
            self._answered()
        return taken

    async def look(self, window: Window) -> Count:
        """How things stand with a window."""
        count, _ = await self.take(window, 0)
        return count

    async def correct(self, taken: Taken, cost: int) -> None:
        """It was so much in truth."""
        if cost == taken.cost:
            return
        try:
            await taken.storage.incr(taken.key, 2 * taken.window.seconds, amount=cost - taken.cost)
        except StorageError as error:
            self._lose(error)

    async def remember(self, window: Window, used: int) -> None:
        """So much was used before, which only a shared counter knows of itself."""
        key, _, _ = self._place(window)
        await self._own.incr(key, 2 * window.seconds, amount=used)

    async def close(self) -> None:
        """Take no more."""
        if self._shared is not None:
            await self._shared.bridge.get_connection().aclose()  # type: ignore[attr-defined]

    async def _take(self, storage: Storage, window: Window, cost: int) -> tuple[Count, Taken | None]:
        key, key_before, elapsed = self._place(window)
        before = await storage.get(key_before) if window.slides else 0
        if not cost:
            return Count(window, before, await storage.get(key), elapsed), None
        now = await storage.incr(key, 2 * window.seconds, amount=cost)
        if Count(window, before, now, elapsed).used <= window.limit:
            return Count(window, before, now, elapsed), Taken(window, cost, key, storage)
        await storage.incr(key, 2 * window.seconds, amount=-cost)
        return Count(window, before, now - cost, elapsed), None

    def _place(self, window: Window) -> tuple[str, str, float]:
        """The counters' keys in this window and the one before, and the seconds that have passed of this one."""
        number, elapsed = divmod(self.now(), window.seconds)
        return f"samewise/{window.name}/{int(number)}", f"samewise/{window.name}/{int(number) - 1}", elapsed

    def _storage(self) -> Storage:
        return self._own if self._shared is None or self.now() < self._lost_until else self._shared

    def _lose(self, error: StorageError) -> None:
        if not self._lost_until:
            _logger.error("Redis does not answer, so limits count for this server alone: %s", error.storage_error)
        self._lost_until = self.now() + _TRY_AGAIN_S

    def _answered(self) -> None:
        if self._lost_until:
            self._lost_until = 0.0
            _logger.info("Redis answers again: limits count for all servers that share it.")


def _redis(url: str) -> RedisStorage:
    timeouts = {"socket_timeout": _GIVE_UP_S, "socket_connect_timeout": _GIVE_UP_S}
    try:
        storage = storage_from_string(f"async+{url}", wrap_exceptions=True, implementation="redispy", **timeouts)
    except Exception as error:  # noqa: BLE001  (the library's own, and what its parsers let through)
        raise ValueError(f"redis_url cannot be used: {type(error).__name__}. {_REDIS_FORM}") from None
    assert isinstance(storage, RedisStorage)
    return storage
