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
"""Pause before each transaction, so that requests that end meanwhile share it. A crash can lose this much usage."""
_logger = logging.getLogger("samewise.usage")


def today() -> str:
    """The day of UTC, as YYYY-MM-DD."""
    return datetime.now(UTC).date().isoformat()


class UsageBook:
    """Writes the usage of ended requests to the storage, many in one transaction, because transactions are slow."""

    def __init__(self, storage: Storage, day: Callable[[], str] = today) -> None:
        self._storage = storage
        self._day = day
        self._unwritten: dict[UsageKey, Used] = {}
        self._writing: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._is_closing = False

    def add(self, tenant: Tenant, used: Used, metrics: Metrics) -> None:
        """Add the usage of a tenant's ended request to the model with these metrics."""
        metrics.observe_usage(tenant.label, used.prompt_tokens, used.cached_tokens, used.completion_tokens)
        key = UsageKey(tenant.name, metrics.model, self._day())
        self._unwritten[key] = self._unwritten.get(key, Used()) + used
        if self._writing is None and self._pause is None:
            self._pause = asyncio.get_running_loop().call_later(_PAUSE_S, self._begin)

    async def written(self) -> None:
        """Returns when all added usage is in the storage, or after a timeout."""
        if self._pause is not None:
            self._begin()
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=2 * RETRY_AFTER_S)

    async def close(self) -> None:
        """Write the remaining usage, without retries."""
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
                _logger.error("usage is not stored yet, and will be retried: %s", error.message)
                if self._is_closing:
                    break
                await asyncio.sleep(RETRY_AFTER_S)


class Account:
    """The reservation of one request, and the account that it is charged to."""

    def __init__(self, tenant: Tenant, reservation: Reservation, usage: UsageBook, metrics: Metrics) -> None:
        """`metrics` count for the model that the request names."""
        self.tenant = tenant
        self.headers = reservation.headers
        """Rate-limit headers for the response."""
        self._reservation = reservation
        self._usage = usage
        self._metrics = metrics
        self._is_open = True

    def close(self, used: Used) -> None:
        """Charge the ended request with this usage. Later calls change nothing."""
        if self._is_open:
            self._is_open = False
            self._reservation.settle(used.tokens)
            if used.requests:
                self._usage.add(self.tenant, used, self._metrics)


@dataclass(frozen=True, slots=True)
class Accounts:
    """Keys, limits and usage of all tenants."""

    keys: KeyRing
    limits: RateLimits
    usage: UsageBook

    async def open(self, name: str, cost: Cost, metrics: Metrics, *, is_background: bool = False) -> Account:
        """Reserve the cost of a request for the tenant of this name, to the model with these metrics.

        Raises LimitError.
        """
        tenant = self.keys.named(name)
        limited = tenant
        if is_background:  # it may wait for hours, and must not block the key meanwhile
            limited = replace(tenant, limits=tenant.limits.in_background())
            cost = replace(cost, num_output=0)
        return Account(tenant, await self.limits.reserve(limited, cost), self.usage, metrics)

    async def close(self) -> None:
        """Returns when the usage of all ended requests is stored."""
        await self.limits.close()
        await self.usage.close()
