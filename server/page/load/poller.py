"""Polls a server once a second while somebody looks at it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from server.client.load import Load, loads_of, together
from server.client.metrics import NoMetricsError, Window, lines_about, parse
from server.page.api import Api, ApiError
from server.page.load.figures import (
    NAMES,
    Bar,
    Chart,
    Figures,
    Table,
    cache_bar,
    latency_figures,
    queue_figures,
    rate_figures,
    server_figures,
    speculation_table,
)
from server.page.load.history import StepHistory, StepList, Throughput
from server.page.load.requests import RequestList, Row, row_of

WINDOW_S = 10.0
"""Rates and latencies are of so many seconds."""
INTERVAL_S = 1.0
_REQUESTS_EVERY = 2
"""Requests are read with every second poll."""
_NUM_REQUESTS = 20
_LINES = lines_about(NAMES)
_NO_METRICS = "This server does not tell what it does: it has no metrics at /metrics."
_FAILED = "The page has failed to read this, and its log tells why. Choose this view again to retry."
_log = logging.getLogger("samewise.page")
Looker = Callable[[dict[str, Any]], None]
T = TypeVar("T")


class DashboardState(msgspec.Struct, frozen=True):
    """Everything that the view of the server shows at one moment."""

    problem: str = ""
    """Why nothing, or not everything, is known."""
    groups: dict[str, Figures] = {}
    cache: Bar | None = None
    speculation: Table | None = None
    charts: list[Chart] = []
    requests: list[Row] | None = None
    """The newest first; None where the server does not list them."""


class Poller:
    """Reads a server's state with one key. What the server lacks is requested once."""

    def __init__(self, api: Api, key: str) -> None:
        self._api = api
        self._key = key
        self._missing: set[str] = set()
        self._version: str | None = None
        self._window = Window(WINDOW_S)
        self._load = Load()
        self._throughput = Throughput()
        self._steps = StepHistory()
        self._block_size: int | None = None
        self._requests: list[Row] | None = None
        self._num_polls = 0

    async def poll(self) -> DashboardState:
        """The present state, with problems in it."""
        try:
            if self._version is None:
                self._version = await self._api.version()
            await self._read_metrics()
            await self._read_steps()
            if self._num_polls % _REQUESTS_EVERY == 0:
                await self._read_requests()
        except ApiError as problem:
            self._begin_again()
            return DashboardState(problem=f"{problem} Trying again.", requests=self._requests)
        self._num_polls += 1
        return self._state()

    def _begin_again(self) -> None:
        """Another server may be there when it answers again."""
        self._window.clear()
        self._missing.clear()
        self._version = None

    def _state(self) -> DashboardState:
        latest = self._window.latest
        if latest is None:
            return DashboardState(problem=_NO_METRICS, requests=self._requests)
        now = time.time()
        has_steps = "steps" not in self._missing
        charts = [self._throughput.chart(), self._steps.chart(now) if has_steps else None]
        models = ", ".join(dict.fromkeys(source.model for source in latest.sources))
        started = [samples.started for samples in latest.sources.values() if samples.started is not None]
        up_s = now - max(started) if started else None
        groups = {
            "Server": server_figures(self._load, models, self._version or "", up_s),
            "Work": queue_figures(self._load),
            "Throughput": rate_figures(self._load),
            "Latency": latency_figures(self._load) | (self._steps.figures(now) if has_steps else {}),
        }
        return DashboardState(
            groups={title: figures for title, figures in groups.items() if figures},
            cache=cache_bar(self._load, self._block_size),
            speculation=speculation_table(self._load),
            charts=[chart for chart in charts if chart is not None],
            requests=self._requests,
        )

    async def _read_metrics(self) -> None:
        text = await self._unless_missing("metrics", lambda: self._api.metrics(self._key))
        if text is None:
            return
        try:
            self._window.add(parse("".join(_LINES.findall(text)), time.monotonic()))
        except NoMetricsError:
            self._missing.add("metrics")
            return
        self._load = together(list(loads_of(self._window).values()))
        self._throughput.add(self._load)

    async def _read_steps(self) -> None:
        try:
            steps = await self._get("steps", f"after={self._steps.last_step}", StepList)
        except ApiError as problem:
            if problem.param != "after":
                raise
            self._steps.forget()
            return
        if steps is not None:
            self._steps.add(steps)
            self._block_size = None if steps.kv_cache is None else steps.kv_cache.block_size

    async def _read_requests(self) -> None:
        found = await self._get("requests", f"limit={_NUM_REQUESTS}", RequestList)
        self._requests = None if found is None else [row_of(one) for one in found.data]

    async def _get(self, name: str, query: str, kind: type[T]) -> T | None:
        """The answer of an endpoint; None if the server lacks it. Raises ApiError."""
        found = await self._unless_missing(name, lambda: self._api.get(f"/{name}?{query}", self._key))
        try:
            return None if found is None else msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            raise ApiError(f"The server's answer is not what was expected: {error}.") from None

    async def _unless_missing(self, name: str, call: Callable[[], Awaitable[T]]) -> T | None:
        if name in self._missing:
            return None
        try:
            return await call()
        except ApiError as problem:
            if problem.status not in (404, 405):
                raise
            self._missing.add(name)
            return None


class Watches:
    """The polls of one server. Pages with the same key share them; other keys may see other requests."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._watches: dict[str, _Watch] = {}

    def look(self, key: str, looker: Looker) -> Callable[[], None]:
        """Call the looker with each state, as plain data that it must not change; returns a function that ends this."""
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = _Watch(Poller(self._api, key), lambda: self._watches.pop(key, None))
        watch.add(looker)

        def end() -> None:
            if watch.remove(looker) and self._watches.get(key) is watch:
                del self._watches[key]

        return end


class _Watch:
    def __init__(self, poller: Poller, on_failure: Callable[[], object]) -> None:
        self._on_failure = on_failure
        self._poller = poller
        self._lookers: list[Looker] = []
        self._latest: dict[str, Any] | None = None
        self._task = asyncio.create_task(self._run(), name="watch the server")

    def add(self, looker: Looker) -> None:
        self._lookers.append(looker)
        if self._latest is not None:
            looker(self._latest)

    def remove(self, looker: Looker) -> bool:
        """Returns whether it was the last looker, after which the polls end."""
        if looker in self._lookers:
            self._lookers.remove(looker)
        if not self._lookers:
            self._task.cancel()
        return not self._lookers

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                started = loop.time()
                self._show(await self._poller.poll())
                await asyncio.sleep(started + INTERVAL_S - loop.time())
        except Exception:  # noqa: BLE001  (a bug, after which the next looker gets a new watch)
            _log.exception("The page cannot watch the server")
            self._on_failure()
            self._show(DashboardState(problem=_FAILED))

    def _show(self, state: DashboardState) -> None:
        self._latest = msgspec.to_builtins(state)
        for looker in tuple(self._lookers):
            try:
                looker(self._latest)
            except Exception:  # noqa: BLE001  (it must not hinder the others)
                _log.exception("The page cannot show the server's load")
