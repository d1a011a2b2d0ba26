"""What a server's metrics say at one moment. No I/O in here."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A name without the server's prefix, and labels in order of their names; of all engines of a model together."""

MEANS = frozenset({"kv_cache_usage_perc", "learning_tokens_per_step"})
"""Gauges of which several are not added up."""

_SEARCHED = ":num_requests_running"
_COUNTED = ("counter", "histogram")


class NoMetricsError(Exception):
    """The text has no metrics, or not those of a server of language models."""


@dataclass(frozen=True, slots=True)
class ModelSamples:
    """The numbers of one model."""

    gauges: dict[Series, float] = field(default_factory=dict)
    counters: dict[Series, float] = field(default_factory=dict)
    """Those of histograms among them."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The numbers of one server."""

    at: float
    """When they came, in seconds on the clock of time.monotonic."""
    started: float | None
    """When the server's process began, on its own clock."""
    models: dict[str, ModelSamples]


def parse(text: str, at: float) -> Snapshot:
    """Read what Samewise or vLLM answers to /metrics, whatever the prefix of its names is. Raises NoMetricsError."""
    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, LookupError, TypeError):  # whatever the parser stumbles over
        raise NoMetricsError("this is not the text format of Prometheus") from None
    names = {sample.name for family in families for sample in family.samples}
    prefixes = [name.removesuffix(_SEARCHED) for name in names if name.endswith(_SEARCHED)]
    if len(prefixes) != 1:
        raise NoMetricsError(
            "there are no metrics of a server of language models, such as samewise:num_requests_running"
        )
    models: dict[str, ModelSamples] = {}
    for family in families:
        for model, kind, series, value in _samples(family, prefixes[0] + ":"):
            samples = models.setdefault(model, ModelSamples())
            known = samples.counters if kind in _COUNTED else samples.gauges
            known[series] = known.get(series, 0.0) + value
    return Snapshot(at, _started(families), models)


def _samples(family: Metric, prefix: str) -> Iterator[tuple[str, str, Series, float]]:
    """Of each: model, type, name without the prefix and labels, value; of MEANS, an engine's part of it."""
    of_models = [
        sample
        for sample in family.samples
        if sample.name.startswith(prefix) and "model_name" in sample.labels and math.isfinite(sample.value)
    ]
    for sample in of_models:
        model = sample.labels["model_name"]
        labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("model_name", "engine")))
        series, value = (sample.name.removeprefix(prefix), labels), sample.value
        if series[0] in MEANS:
            value /= len({one.labels.get("engine") for one in of_models if one.labels["model_name"] == model})
        yield model, family.type, series, value


def _started(families: list[Metric]) -> float | None:
    samples = [one for family in families for one in family.samples if one.name == "process_start_time_seconds"]
    return samples[0].value if samples else None
