"""Counters of usage per minute or day, in this server or in a Redis that several servers share."""

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
"""Timeout for an answer of Redis."""
_TRY_AGAIN_S = 5.0
"""Pause after a Redis that did not answer."""
_logger = logging.getLogger("samewise.limits")
_REDIS_FORM = "Use redis://[:password@]host:port[/number], and install `samewise[redis]`."
_T = TypeVar("_T")
Unit = Literal["requests", "tokens"]


@dataclass(frozen=True, slots=True)
class Window:
    """A limit on one unit in a period."""

    name: str
    """Identifies the counter: tenant, unit and kind of period."""
    unit: Unit
    limit: int
    seconds: int
    """Length of the period. Periods begin at its multiples, in Unix time."""
    slides: bool
    """Whether usage of the previous period still counts, in proportion to its part within the last `seconds`."""


@dataclass(frozen=True, slots=True)
class Count:
    """The state of a window."""

    window: Window
    before: int
    """Usage in the previous period, if it counts."""
    now: int
    """Usage in this period."""
    elapsed: float
    """Seconds of this period that have passed."""

    @property
    def used(self) -> float:
        """Usage that counts now."""
        return self.before * (1 - self.elapsed / self.window.seconds) + self.now

    @property
    def remaining(self) -> int:
        return max(0, int(self.window.limit - self.used))

    @property
    def reset_s(self) -> float:
        """Seconds until the whole limit is available again, if nothing more is used."""
        to_next = self.window.seconds - self.elapsed
        if self.now and self.window.slides:
            return to_next + self.window.seconds
        return to_next if self.now or self.before else 0.0

    def wait_s(self, cost: int) -> float:
        """Seconds until `cost`, which is at most the limit, is available, if nothing else is used."""
        room, seconds = self.window.limit - cost, self.window.seconds
        to_next = seconds - self.elapsed
        if self.used <= room:
            return 0.0
        if self.now > room and self.window.slides:  # the current period must expire, too
            return to_next + seconds * (1 - room / self.now)
        if self.now > room:
            return to_next
        return seconds * (1 - (room - self.now) / self.before) - self.elapsed


@dataclass(frozen=True, slots=True)
class CountedUse:
    """A counted usage that can be corrected."""

    window: Window
    cost: int
    key: str
    storage: Storage


@dataclass(frozen=True, slots=True)
class _CounterKeys:
    """The current counter of a window."""

    key: str
    """Key of this period's counter."""
    key_before: str
    """Key of the previous period's counter."""
    elapsed: float
    """Seconds of this period that have passed."""


class UsageCounters:
    """The counters. While a shared Redis does not answer, this server counts alone and logs that."""

    def __init__(self, url: str | None = None) -> None:
        """`url` is the address of a Redis.

        Raises ValueError if the URL is invalid or a required package is missing.
        """
        self._own: Storage = MemoryStorage()
        self._shared = None if url is None else _redis(url)
        self._lost_until = 0.0
        """When Redis is tried again; 0 while it answers."""
        self._owed: Counter[tuple[str, int]] = Counter()
        """Corrections that Redis has not received, by key and expiry."""

    def now(self) -> float:
        """Unix time in seconds."""
        return time.time()

    async def take(self, window: Window, cost: int, least: int | None = None) -> tuple[Count, CountedUse | None]:
        """Use `cost` of a window, or what remains of it if that is at least `least`. Otherwise nothing is used.

        Simultaneous calls never take more than there is.
        """
        count, taken = await self._ask(lambda storage: self._take(storage, window, cost))
        if taken is None and least is not None and least <= count.remaining < cost:
            return await self._ask(lambda storage: self._take(storage, window, count.remaining))
        return count, taken

    async def look(self, window: Window) -> Count:
        """The state of a window."""
        return await self._ask(lambda storage: _count(storage, window, self._keys_of(window)))

    async def correct(self, taken: CountedUse, cost: int) -> None:
        """Correct an earlier usage to `cost`."""
        change, expiry = cost - taken.cost, 2 * taken.window.seconds
        if not change:
            return
        if taken.storage is self._shared:
            self._owed[taken.key, expiry] += change
            await self._pay()
        else:
            await taken.storage.incr(taken.key, expiry, amount=change)

    async def remember(self, window: Window, used: int) -> None:
        """Count usage from before the start. A shared counter remembers it anyway."""
        await self._own.incr(self._keys_of(window).key, 2 * window.seconds, amount=used)

    async def close(self) -> None:
        """Close the connection. No calls may follow."""
        if self._shared is not None:
            await self._shared.bridge.get_connection().aclose()  # type: ignore[attr-defined]

    async def _ask(self, work: Callable[[Storage], Awaitable[_T]]) -> _T:
        """Run the work on the shared counters, or on this server's own while they do not answer."""
        if self._shared is None or self.now() < self._lost_until:
            return await work(self._own)
        try:
            result = await work(self._shared)
        except StorageError as error:
            self._lose(error)
            return await work(self._own)
        if self._lost_until:
            self._lost_until = 0.0
            _logger.info("Redis answers again: limits apply across all servers that share it.")
            await self._pay()
        return result

    async def _pay(self) -> None:
        """Send all pending corrections to the shared counters, if they answer."""
        while self._owed and self._shared is not None and not self._lost_until:
            (key, expiry), change = self._owed.popitem()
            try:
                await self._shared.incr(key, expiry, amount=change)
            except StorageError as error:
                self._owed[key, expiry] += change
                self._lose(error)

    async def _take(self, storage: Storage, window: Window, cost: int) -> tuple[Count, CountedUse | None]:
        keys = self._keys_of(window)
        count = await _count(storage, window, keys)
        if count.used + cost > window.limit:
            return count, None
        count = replace(count, now=await storage.incr(keys.key, 2 * window.seconds, amount=cost))
        if count.used <= window.limit:
            return count, CountedUse(window, cost, keys.key, storage)
        await storage.incr(keys.key, 2 * window.seconds, amount=-cost)  # another server was faster
        return replace(count, now=count.now - cost), None

    def _keys_of(self, window: Window) -> "_CounterKeys":
        number, elapsed = divmod(self.now(), window.seconds)
        return _CounterKeys(
            f"samewise/{window.name}/{int(number)}", f"samewise/{window.name}/{int(number) - 1}", elapsed
        )

    def _lose(self, error: StorageError) -> None:
        if not self._lost_until:
            _logger.error("Redis does not answer, so this server applies its limits alone: %s", error.storage_error)
        self._lost_until = self.now() + _TRY_AGAIN_S


async def _count(storage: Storage, window: Window, keys: _CounterKeys) -> Count:
    before = await storage.get(keys.key_before) if window.slides else 0
    return Count(window, before, await storage.get(keys.key), keys.elapsed)


def _redis(url: str) -> RedisStorage:
    timeouts = {"socket_timeout": _GIVE_UP_S, "socket_connect_timeout": _GIVE_UP_S}
    try:
        storage = storage_from_string(f"async+{url}", wrap_exceptions=True, implementation="redispy", **timeouts)
    except Exception as error:  # noqa: BLE001  (the library's own, and what its parsers let through)
        raise ValueError(f"redis_url is not usable ({type(error).__name__}). {_REDIS_FORM}") from None
    assert isinstance(storage, RedisStorage)
    return storage
