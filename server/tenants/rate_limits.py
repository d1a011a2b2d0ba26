"""Rate limits and quotas of tenants.

Requests are counted when they arrive. Tokens and choices are reserved before a request runs, and corrected when it has
ended.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from server.errors import LimitError, QuotaError, RequestLimitError, TokenLimitError
from server.tenants.keys import Tenant
from server.tenants.usage_counters import DAY_S, MINUTE_S, Count, CountedUse, Unit, UsageCounters, Window

_CHOICE_WAIT_S = 1.0
"""Seconds until a retry for a place, because it is unknown when one gets free."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The most that a request can use."""

    num_prompt: int
    """Tokens of its prompts and guidance prompts."""
    num_output: int
    """The most tokens that are generated for all its answers."""
    num_choices: int
    """The most answers generated at the same time; each beam of a search counts as one."""
    is_bounded: bool = True
    """Whether the request limits its answers' length. If not, it may start with less room than they could take."""

    @property
    def num_tokens(self) -> int:
        """The most tokens in all."""
        return self.num_prompt + self.num_output

    @property
    def least(self) -> int:
        """Tokens that must be available for the request to start."""
        return self.num_tokens if self.is_bounded else self.num_prompt + min(self.num_output, 1)


class Reservation:
    """Tokens and choices taken for a request, from its start to its end."""

    def __init__(
        self, limits: "RateLimits", tenant: Tenant, cost: Cost, taken: Sequence[CountedUse], headers: Mapping[str, str]
    ) -> None:
        self.headers = headers
        """Rate-limit headers for its tokens, as from `RateLimits.headers`."""
        self._limits = limits
        self._tenant = tenant
        self._cost = cost
        self._taken = taken
        self._is_open = True

    def settle(self, num_tokens: int) -> None:
        """Correct the reservation to the tokens that the ended request used. Later calls change nothing."""
        if self._is_open:
            self._is_open = False
            self._limits.settle(self._tenant, self._cost, self._taken, num_tokens)


class RateLimits:
    """The limits of all tenants. Each server counts simultaneous choices by itself."""

    def __init__(self, windows: UsageCounters) -> None:
        self._windows = windows
        self._num_choices: Counter[str] = Counter()
        """Running choices by tenant, only for tenants with a limit."""
        self._corrections: set[asyncio.Task[None]] = set()

    async def remember(self, tokens_of_today: Mapping[str, int]) -> None:
        """Count the tokens that tenants, by name, used today before the server was started."""
        for name, num_tokens in tokens_of_today.items():
            await self._windows.remember(_day(name, 0), num_tokens)

    async def count_request(self, tenant: Tenant) -> None:
        """Count a request, whatever its outcome.

        Raises RequestLimitError, and does not count it, if the limit is reached.
        """
        for window in _windows(tenant, "requests"):
            count, taken = await self._windows.take(window, 1)
            if taken is None:
                raise _refusal(count, 1)

    async def reserve(self, tenant: Tenant, cost: Cost) -> Reservation:
        """Take the tokens and choices that a request may use.

        Raises LimitError, and takes nothing, if that exceeds a limit.
        """
        _refuse_impossible(tenant, cost)
        self._enter(tenant, cost)
        taken: list[CountedUse] = []
        counts: list[Count] = []
        try:
            for window in _windows(tenant, "tokens"):
                least = min(cost.least, window.limit)
                count, one = await self._windows.take(window, min(cost.num_tokens, window.limit), least)
                if one is None:
                    raise _refusal(count, least)
                taken.append(one)
                counts.append(count)
        except BaseException:
            self._leave(tenant, cost)
            for one in taken:
                await self._windows.correct(one, 0)
            raise
        return Reservation(self, tenant, cost, taken, _headers(counts))

    def settle(self, tenant: Tenant, cost: Cost, taken: Sequence[CountedUse], num_tokens: int) -> None:
        """Release a request's choices and correct its tokens to what it used."""
        self._leave(tenant, cost)
        if taken:
            task = asyncio.get_running_loop().create_task(self._correct(taken, num_tokens))
            self._corrections.add(task)
            task.add_done_callback(self._corrections.discard)

    async def headers(self, tenant: Tenant) -> Mapping[str, str]:
        """The state of the limits as OpenAI's `x-ratelimit-*` headers; none for what is unlimited."""
        windows = [*_windows(tenant, "requests"), *_windows(tenant, "tokens")]
        shown = {window.unit: window for window in reversed(windows)}
        return _headers([await self._windows.look(window) for window in shown.values()])

    async def close(self) -> None:
        """Returns when all corrections are done."""
        await asyncio.gather(*self._corrections)
        await self._windows.close()

    async def _correct(self, taken: Sequence[CountedUse], num_tokens: int) -> None:
        for one in taken:
            await self._windows.correct(one, num_tokens)

    def _enter(self, tenant: Tenant, cost: Cost) -> None:
        running, most = self._num_choices[tenant.name], tenant.limits.max_choices
        if most is None:
            return
        if running + cost.num_choices > most:
            message = f"Rate limit reached for simultaneous answers: limit {most}, running {running}, "
            raise RequestLimitError(f"{message}requested {cost.num_choices}.", wait_s=_CHOICE_WAIT_S)
        self._num_choices[tenant.name] += cost.num_choices

    def _leave(self, tenant: Tenant, cost: Cost) -> None:
        if tenant.limits.max_choices is not None:
            self._num_choices[tenant.name] -= cost.num_choices


def _windows(tenant: Tenant, unit: Unit) -> Iterator[Window]:
    limits, name = tenant.limits, tenant.name
    per_minute = limits.requests_per_minute if unit == "requests" else limits.tokens_per_minute
    if per_minute is not None:
        yield Window(f"{name}/{unit}", unit, per_minute, MINUTE_S, slides=True)
    if unit == "tokens" and limits.tokens_per_day is not None:
        yield _day(name, limits.tokens_per_day)


def _day(name: str, limit: int) -> Window:
    """The counter for a UTC day. Unused tokens of a day are lost."""
    return Window(f"{name}/tokens/day", "tokens", limit, DAY_S, slides=False)


def _refuse_impossible(tenant: Tenant, cost: Cost) -> None:
    """Raise a LimitError for a request that exceeds a limit whatever was used before."""
    most = tenant.limits.max_choices
    if most is not None and cost.num_choices > most:
        asked = f"The request asks for {cost.num_choices} answers at a time (each beam of a search counts as one)"
        message = f"{asked}, and the limit of this key is {most}."
        raise RequestLimitError(message, wait_s=None)
    for window in _windows(tenant, "tokens"):
        if cost.num_prompt > window.limit:
            message = f"Request too large for this key: limit {window.limit} tokens {_per(window)}, "
            raise TokenLimitError(f"{message}requested {cost.num_prompt} in its prompts.", wait_s=None)


def _refusal(count: Count, amount: int) -> LimitError:
    window, wait_s = count.window, count.wait_s(amount)
    used = f"limit {window.limit}, used {ceil(count.used)}, requested {amount}"
    if window.seconds == DAY_S:
        message = f"You exceeded your current quota: {window.unit} {_per(window)}: {used}. Your quota resets in"
        return QuotaError(f"{message} {_duration(wait_s)}.", wait_s=wait_s)
    kind = RequestLimitError if window.unit == "requests" else TokenLimitError
    message = f"Rate limit reached for {window.unit} {_per(window)}: {used}. Please try again in"
    return kind(f"{message} {_duration(wait_s)}.", wait_s=wait_s)


def _per(window: Window) -> str:
    return "per day" if window.seconds == DAY_S else "per minute"


def _headers(counts: Sequence[Count]) -> Mapping[str, str]:
    """Headers for the first count of each unit: per minute if there is one, otherwise per day."""
    headers: dict[str, str] = {}
    for unit, count in {count.window.unit: count for count in reversed(counts)}.items():
        headers[f"x-ratelimit-limit-{unit}"] = str(count.window.limit)
        headers[f"x-ratelimit-remaining-{unit}"] = str(count.remaining)
        headers[f"x-ratelimit-reset-{unit}"] = _duration(count.reset_s)
    return headers


def _duration(seconds: float) -> str:
    """A duration as in OpenAI's API: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{ceil(seconds * 1000) / 1000:g}s"
    minutes, rest = divmod(ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
