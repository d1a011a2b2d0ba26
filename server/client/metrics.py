"""Parses a server's metrics and computes the recent growth of its counters. No I/O."""

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name without the server's prefix, and its sorted labels. A source's engines are summed."""

MEANS = frozenset({"kv_cache_usage_perc"})
"""Gauges that are averaged instead of summed."""

_SEARCHED = ":num_requests_running"
_COUNTED = ("counter", "histogram")
_OF_SOURCES = ("model_name", "replica", "engine")


class NoMetricsError(Exception):
    """The text has no metrics of a language model server."""


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """A model and one of the replicas that serve it at the same address."""

    model: str
    replica: str = ""
    """Empty if there are no replicas."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The metrics of one source."""

    started: float | None
    """Unix time of the process's start, by the server's clock."""
    gauges: dict[Series, float] = field(default_factory=dict)
    counters: dict[Series, float] = field(default_factory=dict)
    """Counters and the parts of histograms."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An address's metrics at one time."""

    at: float
    """Seconds of time.monotonic()."""
    sources: dict[Source, Samples]


def parse(text: str, at: float) -> Snapshot:
    """Parse the answer of Samewise's or vLLM's /metrics, with any prefix of the names. Raises NoMetricsError."""
    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, LookupError, TypeError):  # the parser raises all of these for malformed text
        raise NoMetricsError("this is not in Prometheus' text format") from None
    prefix = _prefix(families)
    started = _started(families)
    sources: dict[Source, Samples] = {}
    for family in families:
        for source, series, value in _samples(family, prefix):
            samples = sources.setdefault(source, Samples(started.get(source.replica)))
            known = samples.counters if family.type in _COUNTED else samples.gauges
            known[series] = known.get(series, 0.0) + value
    if not sources:
        raise NoMetricsError(f"the metrics with the prefix {prefix} have no label model_name")
    return Snapshot(at, sources)


def lines_about(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern for the lines of these metrics, because parsing only these is much faster.

    Names are given without the server's prefix and without suffixes such as `_total`.
    """
    wanted = "|".join(map(re.escape, (*names, _SEARCHED[1:])))
    suffix = "_total|_bucket|_count|_sum"
    return re.compile(
        rf"^(?:# TYPE )?(?:\w+:(?:{wanted})(?:{suffix})?|process_start_time_seconds)[ {{].*\n?", re.MULTILINE
    )


def _prefix(families: Sequence[Metric]) -> str:
    """The prefix of the server's metrics, with the colon. Raises NoMetricsError unless there is exactly one."""
    names = {sample.name for family in families for sample in family.samples}
    prefixes = sorted(name.removesuffix(_SEARCHED) + ":" for name in names if name.endswith(_SEARCHED))
    match prefixes:
        case [prefix]:
            return prefix
        case []:
            raise NoMetricsError(
                "there are no metrics of a language model server, such as samewise:num_requests_running"
            )
    raise NoMetricsError(f"there are metrics of several servers ({', '.join(prefixes)}): give each server's address")


def _samples(family: Metric, prefix: str) -> Iterator[tuple[Source, Series, float]]:
    """Yield source, series and value of each sample. Values of MEANS are divided by the number of engines."""
    of_models = [(_source(sample), sample) for sample in family.samples if _is_known(sample, prefix)]
    for source, sample in of_models:
        labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in _OF_SOURCES))
        series, value = (sample.name.removeprefix(prefix), labels), sample.value
        if series[0] in MEANS:
            value /= len({one.labels.get("engine") for of, one in of_models if of == source})
        yield source, series, value


def _source(sample: Sample) -> Source:
    return Source(sample.labels["model_name"], sample.labels.get("replica", ""))


def _is_known(sample: Sample, prefix: str) -> bool:
    """Whether the sample belongs to a model and is well-formed."""
    if not sample.name.startswith(prefix) or "model_name" not in sample.labels or not math.isfinite(sample.value):
        return False
    return not sample.name.endswith("_bucket") or _is_bound(sample.labels.get("le", ""))


def _is_bound(text: str) -> bool:
    try:
        return float(text) > -math.inf
    except ValueError:
        return False


def _started(families: Sequence[Metric]) -> dict[str, float]:
    """Start times by replica."""
    samples = [one for family in families for one in family.samples if one.name == "process_start_time_seconds"]
    return {sample.labels.get("replica", ""): sample.value for sample in samples}


_OF_HISTOGRAMS = ("_bucket", "_count", "_sum")


class Window:
    """The recent snapshots of one address, over a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._snapshots: deque[Snapshot] = deque()

    @property
    def latest(self) -> Snapshot | None:
        return self._snapshots[-1] if self._snapshots else None

    def add(self, snapshot: Snapshot) -> None:
        """Add the newest snapshot and drop old ones."""
        self._snapshots.append(snapshot)
        while len(self._snapshots) > 2 and snapshot.at - self._snapshots[1].at >= self._seconds:
            self._snapshots.popleft()

    def clear(self) -> None:
        """Drop all snapshots, because rates that span an outage are meaningless."""
        self._snapshots.clear()

    def rates(self, source: Source) -> dict[Series, float] | None:
        """Growth of a source's counters per second, never negative; None until it was seen twice."""
        seen = [snapshot for snapshot in self._snapshots if source in snapshot.sources]
        seconds = seen[-1].at - seen[0].at if seen else 0.0
        if seconds <= 0:
            return None
        gained: dict[Series, float] = {}
        for before, after in pairwise(snapshot.sources[source] for snapshot in seen):
            for series, value in _increase(before, after).items():
                gained[series] = gained.get(series, 0.0) + value
        return {series: value / seconds for series, value in gained.items()}


def _increase(before: Samples, after: Samples) -> dict[Series, float]:
    """Growth of the counters between two snapshots.

    After a process restart, all counts are new. Otherwise a series that was missing before counts from now on, and a
    series that has fallen was reset to 0, together with all parts of its histogram.
    """
    now, then = after.counters, before.counters
    if before.started != after.started:
        return now
    restarted = {_whole(series) for series, value in now.items() if value < then.get(series, 0.0)}
    return {
        series: value if _whole(series) in restarted else value - then.get(series, value)
        for series, value in now.items()
    }


@lru_cache(maxsize=8192)
def _whole(series: Series) -> Series:
    """The series without a histogram part's suffix and bound."""
    name, labels = series
    for suffix in _OF_HISTOGRAMS:
        name = name.removesuffix(suffix)
    return name, tuple((label, value) for label, value in labels if label != "le")
