"""The load of a server, computed from its metrics. No I/O in here."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from server.client.metrics import MEANS, Series, Source, Window


@dataclass(frozen=True, slots=True)
class Quantile:
    """An estimate from the buckets of a histogram."""

    seconds: float
    is_less: bool = False
    """The value lies above all buckets: `seconds` is where they end."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How well one method of speculation does."""

    method: str
    """Empty if the server does not report methods separately."""
    acceptance: float | None
    """Share of the draft tokens."""
    tokens_per_step: float


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one model on one server, or of several together. None: unknown, or it did not happen."""

    gauges: Mapping[Series, float] = field(default_factory=dict)
    counters: Mapping[Series, float] = field(default_factory=dict)
    rates: Mapping[Series, float] | None = None
    """Growth of the counters a second; None until there are two readings."""

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
        """Running choices, also of batches."""
        running = _total(self.gauges, "num_requests_running")
        return None if running is None else running + (_total(self.gauges, "num_background_running") or 0.0)

    @property
    def waiting(self) -> float | None:
        """Waiting choices, except of batches, which only wait for room to be left."""
        return _total(self.gauges, "num_requests_waiting")

    @property
    def kv_usage(self) -> float | None:
        """Used share of the KV cache; of several servers, the mean."""
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
        """Share of the prompt tokens that were in the prefix cache."""
        return _ratio(self.rate("prefix_cache_hits_total"), self.rate("prefix_cache_queries_total"))

    @property
    def speculation(self) -> tuple[Speculation, ...]:
        """The methods that were used lately."""
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
        """The methods of speculation that were used since the engine's start."""
        drafts = _by_label(self.counters, "spec_decode_num_drafts_total", "method")
        return tuple(sorted(method for method, steps in drafts.items() if steps))

    def tells(self, name: str) -> bool:
        """Whether the server has this metric, even if nothing was counted lately."""
        return any(of == name for samples in (self.gauges, self.counters) for of, _ in samples)

    def rate(self, name: str) -> float | None:
        """A counter's growth a second, over all its labels."""
        return _total(self.rates or {}, name)

    def quantile(self, name: str, share: float) -> Quantile | None:
        """The value that this share of a histogram's recent observations does not exceed."""
        buckets = _by_label(self.rates or {}, f"{name}_bucket", "le")
        return quantile([(float(bound), count) for bound, count in buckets.items()], share)


def loads_of(window: Window) -> dict[Source, Load]:
    """The loads of the last reading's sources, sorted; empty without a reading."""
    latest = window.latest
    if latest is None:
        return {}
    return {
        source: Load(samples.gauges, samples.counters, window.rates(source))
        for source, samples in sorted(latest.sources.items(), key=itemgetter(0))
    }


def together(loads: Sequence[Load]) -> Load:
    """The sum of several loads. Histograms with different buckets are left out."""
    known = [load.rates for load in loads if load.rates is not None]
    mixed = _mixed_histograms(known)
    rates = {series: rate for series, rate in _sum(known).items() if series[0] not in mixed}
    gauges = _sum([load.gauges for load in loads])
    for series in gauges:
        if series[0] in MEANS:
            gauges[series] /= sum(series in load.gauges for load in loads)
    return Load(gauges, _sum([load.counters for load in loads]), rates if known else None)


def quantile(buckets: Iterable[tuple[float, float]], share: float) -> Quantile | None:
    """A quantile as Prometheus estimates it, with values spread evenly over their bucket; None without values.

    `buckets` are pairs of a bound and the number of values that do not exceed it.
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
    """The values by one label; they are added up where there are more labels."""
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
    """Names of the buckets that are not the same in all of them."""
    names = {name for part in parts for name, _ in part if name.endswith("_bucket")}
    bounds = {name: {frozenset(_by_label(part, name, "le")) for part in parts} - {frozenset()} for name in names}
    return {name for name in names if len(bounds[name]) > 1}
