"""Who may use the server, how much, and what was used."""

from dataclasses import dataclass, replace

from server.storage.usage import Used
from server.tenants.keys import KeyRing, Tenant
from server.tenants.rate_limits import Cost, RateLimits, Reservation
from server.tenants.usage_book import UsageBook


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
