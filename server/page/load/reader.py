"""Asks a server what it does, with one key."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from server.client.load import Load, loads_of, together
from server.client.metrics import NoMetricsError, Window, lines_about, parse
from server.page.api import Api, ApiError
from server.page.load.figures import NAMES
from server.page.load.reading import About, Reading, reading_of
from server.page.load.records import RequestList, StepList
from server.page.load.requests import Row, row_of
from server.page.load.step_history import StepHistory
from server.page.load.throughput import Throughput

WINDOW_S = 10.0
"""What rates and latencies are of."""
_REQUESTS_EVERY = 2
"""Readings."""
_NUM_REQUESTS = 20
_LINES = lines_about(NAMES)
_NO_METRICS = "This server does not tell what it does: it has no metrics at /metrics."
T = TypeVar("T")


class Reader:
    """Reads again and again. What the server has not is asked for once."""

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
        self._num_readings = 0

    async def read(self) -> Reading:
        """What the server does now; problems are told in there."""
        try:
            if self._version is None:
                self._version = await self._api.version()
            await self._read_metrics()
            await self._read_steps()
            if self._num_readings % _REQUESTS_EVERY == 0:
                await self._read_requests()
        except ApiError as problem:
            self._begin_again()
            return Reading(problem=f"{problem} Trying again.", requests=self._requests)
        self._num_readings += 1
        return self._reading()

    def _begin_again(self) -> None:
        """What was there may be another server when it answers again."""
        self._window.clear()
        self._missing.clear()
        self._version = None

    def _reading(self) -> Reading:
        latest = self._window.latest
        if latest is None:
            return Reading(problem=_NO_METRICS, requests=self._requests)
        now = time.time()
        charts = [self._throughput.chart()]
        has_steps = "steps" not in self._missing
        if has_steps:
            charts.append(self._steps.chart(now))
        started = [samples.started for samples in latest.sources.values() if samples.started is not None]
        about = About(
            models=", ".join(dict.fromkeys(source.model for source in latest.sources)),
            version=self._version or "",
            up_s=now - max(started) if started else None,
            block_size=self._block_size,
        )
        of_steps = self._steps.figures(now) if has_steps else []
        shown = [chart for chart in charts if chart is not None]
        return reading_of(self._load, about, of_steps, shown, self._requests)

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
            found = await self._unless_missing("steps", lambda: self._get(f"/steps?after={self._steps.last_step}"))
        except ApiError as problem:
            if problem.param != "after":
                raise
            self._steps.forget()
            return
        if found is not None:
            steps = _convert(found, StepList)
            self._steps.add(steps)
            self._block_size = None if steps.kv_cache is None else steps.kv_cache.block_size

    async def _read_requests(self) -> None:
        found = await self._unless_missing("requests", lambda: self._get(f"/requests?limit={_NUM_REQUESTS}"))
        self._requests = None if found is None else [row_of(one) for one in _convert(found, RequestList).data]

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._api.get(path, self._key)

    async def _unless_missing(self, name: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """What the call returns; None for what the server has not."""
        if name in self._missing:
            return None
        try:
            return await call()
        except ApiError as problem:
            if problem.status not in (404, 405):
                raise
            self._missing.add(name)
            return None


def _convert(found: dict[str, Any], kind: type[T]) -> T:
    """Raises ApiError for what is something else."""
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise ApiError(f"The server's answer is not what was expected: {error}.") from None
