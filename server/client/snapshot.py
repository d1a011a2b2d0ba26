"""What a server's metrics say at one moment. No I/O in here."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A name without the server's prefix, and labels in order of their names; of all engines of a source together."""

MEANS = frozenset({"kv_cache_usage_perc", "learning_tokens_per_step"})
"""Gauges of which several are not added up."""

_SEARCHED = ":num_requests_running"
_COUNTED = ("counter", "histogram")
_OF_SOURCES = ("model_name", "replica", "engine")


class NoMetricsError(Exception):
    """The text has no metrics, or not those of a server of language models."""


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """Whose numbers they are: of a model, and of one of the replicas that answer at an address together."""

    model: str
    replica: str = ""
    """Empty where the server is the only one there."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The numbers of one source."""

    started: float | None
    """When its process began, on its own clock."""
    gauges: dict[Series, float] = field(default_factory=dict)
    counters: dict[Series, float] = field(default_factory=dict)
    """Those of histograms among them."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The numbers that came from one address."""

    at: float
    """When they came, in seconds on the clock of time.monotonic."""
    sources: dict[Source, Samples]


def parse(text: str, at: float) -> Snapshot:
    """Read what Samewise or vLLM answers to /metrics, whatever the prefix of its names is. Raises NoMetricsError."""
    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, LookupError, TypeError):  # whatever the parser stumbles over
        raise NoMetricsError("this is not the text format of Prometheus") from None
    prefix = _prefix(families)
    started = _started(families)
    sources: dict[Source, Samples] = {}
    for family in families:
        for source, series, value in _samples(family, prefix):
            samples = sources.setdefault(source, Samples(started.get(source.replica)))
            known = samples.counters if family.type in _COUNTED else samples.gauges
            known[series] = known.get(series, 0.0) + value
    if not sources:
        raise NoMetricsError(f"the metrics that begin with {prefix} have no label model_name")
    return Snapshot(at, sources)


def lines_about(names: Iterable[str]) -> re.Pattern[str]:
    """Finds the lines that `parse` needs to know of these names only, which takes a fraction of the time. The names are
    without the server's prefix, and without what the kind of a number adds to its name.
    """
    wanted = "|".join(map(re.escape, (*names, _SEARCHED[1:])))
    suffix = "_total|_bucket|_count|_sum"
    return re.compile(
        rf"^(?:# TYPE )?(?:\w+:(?:{wanted})(?:{suffix})?|process_start_time_seconds)[ {{].*\n?", re.MULTILINE
    )


def _prefix(families: Sequence[Metric]) -> str:
    """With the colon. Raises NoMetricsError unless there is exactly one."""
    names = {sample.name for family in families for sample in family.samples}
    prefixes = sorted(name.removesuffix(_SEARCHED) + ":" for name in names if name.endswith(_SEARCHED))
    match prefixes:
        case [prefix]:
            return prefix
        case []:
            raise NoMetricsError(
                "there are no metrics of a server of language models, such as samewise:num_requests_running"
            )
    raise NoMetricsError(f"there are metrics of several servers ({', '.join(prefixes)}): name the address of each")


def _samples(family: Metric, prefix: str) -> Iterator[tuple[Source, Series, float]]:
    """Of each: whose, name without the prefix and labels, value; of MEANS, an engine's part of it."""
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
    """Whether it is a model's, and what has to be numbers is."""
    if not sample.name.startswith(prefix) or "model_name" not in sample.labels or not math.isfinite(sample.value):
        return False
    return not sample.name.endswith("_bucket") or _is_bound(sample.labels.get("le", ""))


def _is_bound(text: str) -> bool:
    try:
        return float(text) > -math.inf
    except ValueError:
        return False


def _started(families: Sequence[Metric]) -> dict[str, float]:
    """By replica."""
    samples = [one for family in families for one in family.samples if one.name == "process_start_time_seconds"]
    return {sample.labels.get("replica", ""): sample.value for sample in samples}
