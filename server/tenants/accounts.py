"""Accounts: who may use the server, how much, and what was used."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from server.errors import RETRY_AFTER_S
from server.storage.storage import NotStoredError, Storage
from server.storage.usage import UsageKey, UsageTable, Used
from server.telemetry.metrics import Metrics
from server.tenants.keys import KeyRing, Tenant
from server.tenants.rate_limits import Cost, RateLimits, Reservation

_PAUSE_S = 0.5
"""Before each transaction, so that what ends meanwhile goes with it. So much of it a crash may cost."""
_logger = logging.getLogger("samewise.usage")


def today() -> str:
    """The day of UTC, as YYYY-MM-DD."""
    return datetime.now(UTC).date().isoformat()


class UsageBook:
    """What has ended is written with what ends in the next moment: a transaction takes longer than all else."""

    def __init__(self, storage: Storage, metrics: Metrics, model: str, day: Callable[[], str] = today) -> None:
        self._storage = storage
        self._metrics = metrics
        self._model = model
        self._day = day
        self._unwritten: dict[UsageKey, Used] = {}
        self._writing: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._is_closing = False

    def add(self, tenant: Tenant, used: Used) -> None:
        """A request of the tenant has ended, and used this."""
        self._metrics.observe_usage(tenant.label, used.prompt_tokens, used.cached_tokens, used.completion_tokens)
        key = UsageKey(tenant.name, self._model, self._day())
        self._unwritten[key] = self._unwritten.get(key, Used()) + used
        if self._writing is None and self._pause is None:
            self._pause = asyncio.get_running_loop().call_later(_PAUSE_S, self._begin)

    async def written(self) -> None:
        """Returns when all that was added is in the storage, or that takes long."""
        if self._pause is not None:
            self._begin()
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=2 * RETRY_AFTER_S)

    async def close(self) -> None:
        """Write what is left, if that can be done at once."""
        self._is_closing = True
        await self.written()

    def _begin(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        try:
            await self._write_all()
        finally:
            self._writing = None

    async def _write_all(self) -> None:
        while self._unwritten:
            taken, self._unwritten = self._unwritten, {}
            try:
                await self._storage.on(UsageTable, lambda table, taken=taken: table.add(taken))  # type: ignore[misc]
            except NotStoredError as error:
                for key, used in taken.items():
                    self._unwritten[key] = self._unwritten.get(key, Used()) + used
                _logger.error("usage is not written down yet: %s", error.message)
                if self._is_closing:
                    break
                await asyncio.sleep(RETRY_AFTER_S)


class Account:
    """What one request uses."""

    def __init__(self, tenant: Tenant, reservation: Reservation, usage: UsageBook) -> None:
        self.tenant = tenant
        self.headers = reservation.headers
        """How the limits of its tokens stand with it, for the answer."""
        self._reservation = reservation
        self._usage = usage
        self._is_open = True

    def close(self, used: Used) -> None:
        """The request has ended: this is what is counted of it. Later calls change nothing."""
        if self._is_open:
            self._is_open = False
            self._reservation.settle(used.tokens)
            if used.requests:
                self._usage.add(self.tenant, used)


@dataclass(frozen=True, slots=True)
class Accounts:
    """All that is known of tenants."""

    keys: KeyRing
    limits: RateLimits
    usage: UsageBook

    async def open(self, name: str, cost: Cost, *, is_background: bool = False) -> Account:
        """For a request of the tenant of this name. Raises LimitError."""
        tenant = self.keys.named(name)
        limited = tenant
        if is_background:  # it may wait for hours, in which its key is used for other things
            limited = replace(tenant, limits=tenant.limits.in_background())
            cost = replace(cost, num_output=0)
        return Account(tenant, await self.limits.reserve(limited, cost), self.usage)

    async def close(self) -> None:
        """When all that has ended is counted."""
        await self.limits.close()
        await self.usage.close()
