"""A server's load, computed from its metrics. No I/O."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from server.client.metrics import MEANS, Series, Source, Window


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile estimated from a histogram's buckets."""

    seconds: float
    is_less: bool = False
    """Whether `seconds` is only a lower bound, because the value exceeds the largest finite bucket."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Acceptance of one speculation method."""

    method: str
    """Empty if the server does not report methods separately."""
    acceptance: float | None
    """Accepted fraction of the draft tokens."""
    tokens_per_step: float


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one model on one server, or the combined load of several. Values that are unknown are None."""

    gauges: Mapping[Series, float] = field(default_factory=dict)
    counters: Mapping[Series, float] = field(default_factory=dict)
    rates: Mapping[Series, float] | None = None
    """Growth of the counters per second; None until there are two readings."""

    @property
    def state(self) -> str:
        """The engine's state; `up` if the server does not report it."""
        states = [value for value, on in _by_label(self.gauges, "engine_state", "state").items() if on]
        if states:
            return states[0] if len(states) == 1 else "mixed"
        sleeping = _by_label(self.gauges, "engine_sleep_state", "sleep_state").get("awake") == 0
        return "asleep" if sleeping else "up"

    @property
    def running(self) -> float | None:
        """Running choices, including batches' choices."""
        running = _total(self.gauges, "num_requests_running")
        return None if running is None else running + (_total(self.gauges, "num_background_running") or 0.0)

    @property
    def waiting(self) -> float | None:
        """Queued choices, without batches' choices, which run only in spare capacity."""
        return _total(self.gauges, "num_requests_waiting")

    @property
    def kv_usage(self) -> float | None:
        """Used fraction of the KV cache; the mean for several servers."""
        return _total(self.gauges, "kv_cache_usage_perc")

    @property
    def kv_blocks(self) -> Mapping[str, float]:
        """Blocks of the KV cache by use: `held`, `cached`, `free`; empty if the server does not report them."""
        return _by_label(self.gauges, "kv_cache_blocks", "state")

    @property
    def preemptions(self) -> float | None:
        """Preemptions since the engine's start."""
        return _total(self.counters, "num_preemptions_total")

    @property
    def restarts(self) -> float | None:
        """Restarts of the engine."""
        return _total(self.counters, "engine_restarts_total")

    @property
    def hit_rate(self) -> float | None:
        """Fraction of recent prompt tokens that were found in the prefix cache."""
        return _ratio(self.rate("prefix_cache_hits_total"), self.rate("prefix_cache_queries_total"))

    @property
    def speculation(self) -> tuple[Speculation, ...]:
        """Recent acceptance of each speculation method in use."""
        drafts, emitted, drafted, accepted = (
            _by_label(self.rates or {}, f"spec_decode_num_{name}_total", "method")
            for name in ("drafts", "emitted_tokens", "draft_tokens", "accepted_tokens")
        )
        return tuple(
            Speculation(
                method,
                _ratio(accepted.get(method), drafted.get(method)),
                emitted[method] / steps if method in emitted else 1 + accepted.get(method, 0.0) / steps,
            )
            for method, steps in sorted(drafts.items())
            if steps
        )

    @property
    def drafting_methods(self) -> tuple[str, ...]:
        """Speculation methods used since the engine's start."""
        drafts = _by_label(self.counters, "spec_decode_num_drafts_total", "method")
        return tuple(sorted(method for method, steps in drafts.items() if steps))

    def has_metric(self, name: str) -> bool:
        """Whether the server has this metric, even without recent observations."""
        return any(of == name for samples in (self.gauges, self.counters) for of, _ in samples)

    def rate(self, name: str) -> float | None:
        """A counter's growth per second, summed over its labels."""
        return _total(self.rates or {}, name)

    def quantile(self, name: str, share: float) -> Quantile | None:
        """The quantile `share` (0 to 1) of a histogram's recent observations."""
        buckets = _by_label(self.rates or {}, f"{name}_bucket", "le")
        return quantile([(float(bound), count) for bound, count in buckets.items()], share)


def loads_of(window: Window) -> dict[Source, Load]:
    """The load of each source in the last snapshot, sorted by source; empty without a snapshot."""
    latest = window.latest
    if latest is None:
        return {}
    return {
        source: Load(samples.gauges, samples.counters, window.rates(source))
        for source, samples in sorted(latest.sources.items(), key=itemgetter(0))
    }


def combined(loads: Sequence[Load]) -> Load:
    """The sum of several loads. Histograms whose buckets differ are omitted."""
    known = [load.rates for load in loads if load.rates is not None]
    mixed = _mixed_histograms(known)
    rates = {series: rate for series, rate in _sum(known).items() if series[0] not in mixed}
    gauges = _sum([load.gauges for load in loads])
    for series in gauges:
        if series[0] in MEANS:
            gauges[series] /= sum(series in load.gauges for load in loads)
    return Load(gauges, _sum([load.counters for load in loads]), rates if known else None)


def quantile(buckets: Iterable[tuple[float, float]], share: float) -> Quantile | None:
    """Estimate a quantile as Prometheus does, assuming values spread evenly in their bucket; None without values.

    `buckets` are pairs of an upper bound and the number of values that do not exceed it.
    """
    bounds = sorted(buckets)
    if not bounds or bounds[-1][1] <= 0:
        return None
    rank = share * bounds[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in bounds:
        if count >= rank:
            if bound == float("inf"):
                return Quantile(lower, is_less=True)
            return Quantile(lower + (bound - lower) * (rank - below) / (count - below))
        lower, below = bound, count
    return None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _matching(samples: Mapping[Series, float], name: str) -> Iterator[tuple[dict[str, str], float]]:
    return ((dict(labels), value) for (of, labels), value in samples.items() if of == name)


def _total(samples: Mapping[Series, float], name: str) -> float | None:
    values = [value for _, value in _matching(samples, name)]
    return sum(values) if values else None


def _by_label(samples: Mapping[Series, float], name: str, label: str) -> dict[str, float]:
    """A metric's values by one label, summed over the other labels."""
    found: dict[str, float] = {}
    for labels, value in _matching(samples, name):
        key = labels.get(label, "")
        found[key] = found.get(key, 0.0) + value
    return found


def _sum(parts: Sequence[Mapping[Series, float]]) -> dict[Series, float]:
    total: dict[Series, float] = {}
    for part in parts:
        for series, value in part.items():
            total[series] = total.get(series, 0.0) + value
    return total


def _mixed_histograms(parts: Sequence[Mapping[Series, float]]) -> set[str]:
    """Names of the bucket series whose bounds differ between the parts."""
    names = {name for part in parts for name, _ in part if name.endswith("_bucket")}
    bounds = {name: {frozenset(_by_label(part, name, "le")) for part in parts} - {frozenset()} for name in names}
    return {name for name in names if len(bounds[name]) > 1}
