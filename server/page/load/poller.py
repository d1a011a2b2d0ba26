"""Polls a server once a second while a page shows it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from server.client.load import Load, combined, loads_of
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
"""Rates and latencies cover this many seconds."""
INTERVAL_S = 1.0
_REQUESTS_EVERY = 2
"""Requests are read with every n-th poll."""
_NUM_REQUESTS = 20
_LINES = lines_about(NAMES)
_NO_METRICS = "This server has no metrics at /metrics, so its load is unknown."
_FAILED = "Internal error of the page. See the server's log for details, and open this view again to retry."
_log = logging.getLogger("samewise.page")
Subscriber = Callable[[dict[str, Any]], None]
T = TypeVar("T")


class DashboardState(msgspec.Struct, frozen=True):
    """Everything that the server view shows at one moment."""

    problem: str = ""
    """Why some or all of the state is unknown."""
    groups: dict[str, Figures] = {}
    cache: Bar | None = None
    speculation: Table | None = None
    charts: list[Chart] = []
    requests: list[Row] | None = None
    """Newest first; None if the server does not list requests."""
    models: list[str] = []
    """Names of all models of the server, shown or not."""


class Poller:
    """Reads a server's state with one key. Endpoints that the server lacks are tried only once."""

    def __init__(self, api: Api, key: str, model: str = "") -> None:
        """`model` is the one of several to show; empty: all of them together, which have no steps in common."""
        self._api = api
        self._key = key
        self._model = model
        self._models: list[str] = []
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
        """The current state, including any error."""
        try:
            if self._version is None:
                self._version = await self._api.version()
            await self._read_metrics()
            if self._has_steps:
                await self._read_steps()
            if self._num_polls % _REQUESTS_EVERY == 0:
                await self._read_requests()
        except ApiError as problem:
            self._begin_again()
            return DashboardState(problem=f"{problem} Retrying.", requests=self._requests, models=self._models)
        self._num_polls += 1
        return self._state()

    @property
    def _has_steps(self) -> bool:
        is_one = bool(self._model) or len(self._models) < 2
        return is_one and "steps" not in self._missing

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
        charts = [self._throughput.chart(), self._steps.chart(now) if self._has_steps else None]
        models = self._model or ", ".join(self._models)
        started = [samples.started for samples in latest.sources.values() if samples.started is not None]
        up_s = now - max(started) if started else None
        groups = {
            "Server": server_figures(self._load, models, self._version or "", up_s),
            "Work": queue_figures(self._load),
            "Throughput": rate_figures(self._load),
            "Latency": latency_figures(self._load) | (self._steps.figures(now) if self._has_steps else {}),
        }
        return DashboardState(
            groups={title: figures for title, figures in groups.items() if figures},
            cache=cache_bar(self._load, self._block_size),
            speculation=speculation_table(self._load),
            charts=[chart for chart in charts if chart is not None],
            requests=self._requests,
            models=self._models,
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
        loads = loads_of(self._window)
        self._models = list(dict.fromkeys(source.model for source in loads))
        self._load = combined([one for source, one in loads.items() if self._model in ("", source.model)])
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
        """An endpoint's answer; None if the server lacks the endpoint. Raises ApiError."""
        path = f"/{name}?{query}" + (f"&model={quote(self._model, safe='')}" if self._model else "")
        found = await self._unless_missing(name, lambda: self._api.get(path, self._key))
        try:
            return None if found is None else msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            raise ApiError(f"The server's answer to /{name} cannot be read: {error}.") from None

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


class SharedPollers:
    """Pollers of one server, one per key and model: other keys may see other requests."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._pollers: dict[tuple[str, str], _SharedPoller] = {}

    def subscribe(self, key: str, subscriber: Subscriber, model: str = "") -> Callable[[], None]:
        """Call `subscriber` with each state of the model, or of all, as plain data that it must not change.

        Returns a function to stop this.
        """
        of = key, model
        poller = self._pollers.get(of)
        if poller is None:
            poller = self._pollers[of] = _SharedPoller(Poller(self._api, *of), lambda: self._pollers.pop(of, None))
        poller.add(subscriber)

        def end() -> None:
            if poller.remove(subscriber) and self._pollers.get(of) is poller:
                del self._pollers[of]

        return end


class _SharedPoller:
    def __init__(self, poller: Poller, on_failure: Callable[[], object]) -> None:
        self._on_failure = on_failure
        self._poller = poller
        self._subscribers: list[Subscriber] = []
        self._latest: dict[str, Any] | None = None
        self._task = asyncio.create_task(self._run(), name="poll the server")

    def add(self, subscriber: Subscriber) -> None:
        self._subscribers.append(subscriber)
        if self._latest is not None:
            subscriber(self._latest)

    def remove(self, subscriber: Subscriber) -> bool:
        """Returns whether this was the last subscriber, in which case polling ends."""
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
        if not self._subscribers:
            self._task.cancel()
        return not self._subscribers

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                started = loop.time()
                self._show(await self._poller.poll())
                await asyncio.sleep(started + INTERVAL_S - loop.time())
        except Exception:  # noqa: BLE001  (a bug; the next subscriber starts a new poller)
            _log.exception("Internal error while polling the server")
            self._on_failure()
            self._show(DashboardState(problem=_FAILED))

    def _show(self, state: DashboardState) -> None:
        self._latest = msgspec.to_builtins(state)
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(self._latest)
            except Exception:  # noqa: BLE001  (a bug must not affect other subscribers)
                _log.exception("Internal error while showing the server's load")
