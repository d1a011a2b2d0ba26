"""Counting what is used within a minute or a day, here or in a Redis that several servers share."""

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

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
_T = TypeVar("_T")
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
class CountedUse:
    """What was counted, so that it can be corrected."""

    window: Window
    cost: int
    key: str
    storage: Storage


@dataclass(frozen=True, slots=True)
class _Place:
    """Where it is counted now."""

    key: str
    """Of the counter of this window, ..."""
    key_before: str
    """... and of the one before."""
    elapsed: float
    """Seconds of this one that have passed."""


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
        self._owed: Counter[tuple[str, int]] = Counter()
        """Corrections, by key and expiry, of which it must still be told."""

    def now(self) -> float:
        """Unix time in seconds."""
        return time.time()

    async def take(self, window: Window, cost: int, least: int | None = None) -> tuple[Count, CountedUse | None]:
        """Use so much of a window, or as much as there is if that is not less than `least`; else nothing is used.

        Of several that ask at the same time none gets what is not there.
        """
        count, taken = await self._ask(lambda storage: self._take(storage, window, cost))
        if taken is None and least is not None and least <= count.remaining < cost:
            return await self._ask(lambda storage: self._take(storage, window, count.remaining))
        return count, taken

    async def look(self, window: Window) -> Count:
        """How things stand with a window."""
        return await self._ask(lambda storage: _count(storage, window, self._place(window)))

    async def correct(self, taken: CountedUse, cost: int) -> None:
        """It was so much in truth."""
        change, expiry = cost - taken.cost, 2 * taken.window.seconds
        if not change:
            return
        if taken.storage is self._shared:
            self._owed[taken.key, expiry] += change
            await self._pay()
        else:
            await taken.storage.incr(taken.key, expiry, amount=change)

    async def remember(self, window: Window, used: int) -> None:
        """So much was used before, which only a shared counter knows of itself."""
        await self._own.incr(self._place(window).key, 2 * window.seconds, amount=used)

    async def close(self) -> None:
        """Take no more."""
        if self._shared is not None:
            await self._shared.bridge.get_connection().aclose()  # type: ignore[attr-defined]

    async def _ask(self, work: Callable[[Storage], Awaitable[_T]]) -> _T:
        """What the work brings on the shared counters, or while these do not answer on those of this server."""
        if self._shared is None or self.now() < self._lost_until:
            return await work(self._own)
        try:
            result = await work(self._shared)
        except StorageError as error:
            self._lose(error)
            return await work(self._own)
        if self._lost_until:
            self._lost_until = 0.0
            _logger.info("Redis answers again: limits count for all servers that share it.")
            await self._pay()
        return result

    async def _pay(self) -> None:
        """Tell the shared counters of all corrections that are left, if they answer."""
        while self._owed and self._shared is not None and not self._lost_until:
            (key, expiry), change = self._owed.popitem()
            try:
                await self._shared.incr(key, expiry, amount=change)
            except StorageError as error:
                self._owed[key, expiry] += change
                self._lose(error)

    async def _take(self, storage: Storage, window: Window, cost: int) -> tuple[Count, CountedUse | None]:
        place = self._place(window)
        count = await _count(storage, window, place)
        if count.used + cost > window.limit:
            return count, None
        count = replace(count, now=await storage.incr(place.key, 2 * window.seconds, amount=cost))
        if count.used <= window.limit:
            return count, CountedUse(window, cost, place.key, storage)
        await storage.incr(place.key, 2 * window.seconds, amount=-cost)  # others were there between the two
        return replace(count, now=count.now - cost), None

    def _place(self, window: Window) -> "_Place":
        number, elapsed = divmod(self.now(), window.seconds)
        return _Place(f"samewise/{window.name}/{int(number)}", f"samewise/{window.name}/{int(number) - 1}", elapsed)

    def _lose(self, error: StorageError) -> None:
        if not self._lost_until:
            _logger.error("Redis does not answer, so limits count for this server alone: %s", error.storage_error)
        self._lost_until = self.now() + _TRY_AGAIN_S


async def _count(storage: Storage, window: Window, place: _Place) -> Count:
    before = await storage.get(place.key_before) if window.slides else 0
    return Count(window, before, await storage.get(place.key), place.elapsed)


def _redis(url: str) -> RedisStorage:
    timeouts = {"socket_timeout": _GIVE_UP_S, "socket_connect_timeout": _GIVE_UP_S}
    try:
        storage = storage_from_string(f"async+{url}", wrap_exceptions=True, implementation="redispy", **timeouts)
    except Exception as error:  # noqa: BLE001  (the library's own, and what its parsers let through)
        raise ValueError(f"redis_url cannot be used: {type(error).__name__}. {_REDIS_FORM}") from None
    assert isinstance(storage, RedisStorage)
    return storage
