"""When to send: a fixed number at a time, or at random moments of a fixed rate."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import httpx

from server.cli.loadtest.timed_request import Outcome, Target, send
from server.cli.loadtest.workload import LoadRequest


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Closed loop with `concurrency`; open loop (Poisson) with `rate`; with both, the rate as far as there is room."""

    concurrency: int | None = None
    """Requests in flight at most; None sets no limit."""
    rate: float | None = None
    """Requests a second on average; None sends as soon as there is room."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Outcomes in the order in which the requests were given."""

    outcomes: tuple[Outcome, ...]
    duration_s: float
    """From the first request sent to the last answer."""


def open_client(headers: dict[str, str]) -> httpx.AsyncClient:
    """A client without limits of its own: how long and how many at a time is the load's business."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=False)


async def run_load(
    client: httpx.AsyncClient,
    target: Target,
    requests: Sequence[LoadRequest],
    arrivals: Arrivals,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> LoadResult:
    """Send all requests as `arrivals` says and wait for all answers; `on_done` sees each as it ends."""
    gate = asyncio.Semaphore(arrivals.concurrency) if arrivals.concurrency is not None else contextlib.nullcontext()

    async def one(request: LoadRequest) -> Outcome:
        async with gate:
            outcome = await send(client, target, request)
        on_done(outcome)
        return outcome

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) async for request in _arriving(requests, arrivals)]
    return LoadResult(tuple(task.result() for task in tasks), time.perf_counter() - start)


def arrival_times(arrivals: Arrivals, count: int) -> list[float]:
    """Seconds from the start, ascending: a Poisson process beginning at 0; all 0 without a rate."""
    if arrivals.rate is None:
        return [0.0] * count
    rng = random.Random(arrivals.seed)
    gaps = (rng.expovariate(arrivals.rate) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


async def _arriving(requests: Sequence[LoadRequest], arrivals: Arrivals) -> AsyncIterator[LoadRequest]:
    start = time.perf_counter()
    for request, due in zip(requests, arrival_times(arrivals, len(requests)), strict=True):
        if due > 0:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        yield request
