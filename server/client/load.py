"""What the numbers of a server say about its load. No I/O in here."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from server.client.snapshot import MEANS, Series, Source
from server.client.window import Window


@dataclass(frozen=True, slots=True)
class Quantile:
    """An estimate from the buckets of a histogram."""

    seconds: float
    is_less: bool = False
    """The value lies above all buckets: `seconds` is where they end."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What one method of speculation brings."""

    method: str
    """Empty where the server does not tell methods apart."""
    acceptance: float | None
    """Share of the draft tokens."""
    tokens_per_step: float


@dataclass(frozen=True, slots=True)
class Learning:
    """What came of training draft heads on what is served."""

    tokens_per_step_first: float | None
    tokens_per_step_current: float | None
    publications: float
    rollbacks: float


@dataclass(frozen=True, slots=True)
class Load:
    """Of one model on one server, or of several together. What is None is not known, or did not happen."""

    gauges: Mapping[Series, float] = field(default_factory=dict)
    counters: Mapping[Series, float] = field(default_factory=dict)
    rates: Mapping[Series, float] | None = None
    """By the second; None until there is something to compare with."""

    @property
    def state(self) -> str:
        """Of the engine; `up` where the server does not say more."""
        states = [value for value, on in _by_label(self.gauges, "engine_state", "state").items() if on]
        if states:
            return states[0] if len(states) == 1 else "mixed"
        sleeping = _by_label(self.gauges, "engine_sleep_state", "sleep_state").get("awake") == 0
        return "asleep" if sleeping else "up"

    @property
    def running(self) -> float | None:
        """With those of batches: it is what the engine does."""
        running = _total(self.gauges, "num_requests_running")
        return None if running is None else running + (_total(self.gauges, "num_background_running") or 0.0)

    @property
    def waiting(self) -> float | None:
        """Without those of batches, which only wait for room to be left."""
        return _total(self.gauges, "num_requests_waiting")

    @property
    def kv_usage(self) -> float | None:
        """0 to 1; of several, their mean."""
        return _total(self.gauges, "kv_cache_usage_perc")

    @property
    def kv_blocks(self) -> Mapping[str, float]:
        """Of the KV cache by what they are for: `held`, `cached`, `free`; empty where the server does not say."""
        return _by_label(self.gauges, "kv_cache_blocks", "state")

    @property
    def preemptions(self) -> float | None:
        """Since the engine's start."""
        return _total(self.counters, "num_preemptions_total")

    @property
    def restarts(self) -> float | None:
        """Of the engine."""
        return _total(self.counters, "engine_restarts_total")

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were in the prefix cache."""
        return _ratio(self.rate("prefix_cache_hits_total"), self.rate("prefix_cache_queries_total"))

    @property
    def speculation(self) -> tuple[Speculation, ...]:
        """By method, those that were used."""
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
        """Of speculation: those that were used since the engine's start."""
        drafts = _by_label(self.counters, "spec_decode_num_drafts_total", "method")
        return tuple(sorted(method for method, steps in drafts.items() if steps))

    @property
    def tenants(self) -> tuple[tuple[str, float], ...]:
        """Names, and tokens a second of prompts and answers; most first, those with none left out."""
        name = "tenant_tokens_total"
        kinds = [_by_label(self.rates or {}, name, "tenant", kind=kind) for kind in ("prompt", "completion")]
        tokens = {tenant: sum(kind.get(tenant, 0.0) for kind in kinds) for tenant in {**kinds[0], **kinds[1]}}
        return tuple(sorted(((t, rate) for t, rate in tokens.items() if rate), key=lambda of: (-of[1], of[0])))

    @property
    def learning(self) -> Learning | None:
        """Since the engine's start; None where nothing is learnt."""
        publications = _total(self.counters, "learning_publications_total")
        if publications is None:
            return None
        per_step = _by_label(self.gauges, "learning_tokens_per_step", "heads")
        rollbacks = _total(self.counters, "learning_rollbacks_total") or 0.0
        return Learning(per_step.get("first"), per_step.get("current"), publications, rollbacks)

    def tells(self, name: str) -> bool:
        """Whether the server has such a number at all, be it that nothing was counted lately."""
        return any(of == name for samples in (self.gauges, self.counters) for of, _ in samples)

    def rate(self, name: str) -> float | None:
        """Of a counter, whatever its labels are."""
        return _total(self.rates or {}, name)

    def quantile(self, name: str, share: float) -> Quantile | None:
        """The value of a histogram that this share of those lately counted does not exceed."""
        buckets = _by_label(self.rates or {}, f"{name}_bucket", "le")
        return quantile([(float(bound), count) for bound, count in buckets.items()], share)


def loads_of(window: Window) -> dict[Source, Load]:
    """Of what was there at the last reading, in a lasting order; empty without one."""
    latest = window.latest
    if latest is None:
        return {}
    return {
        source: Load(samples.gauges, samples.counters, window.rates(source))
        for source, samples in sorted(latest.sources.items(), key=itemgetter(0))
    }


def together(loads: Sequence[Load]) -> Load:
    """The sum of all: one that serves nothing adds nothing. Histograms with different buckets are left out."""
    known = [load.rates for load in loads if load.rates is not None]
    mixed = _mixed_histograms(known)
    rates = {series: rate for series, rate in _sum(known).items() if series[0] not in mixed}
    gauges = _sum([load.gauges for load in loads])
    for series in gauges:
        if series[0] in MEANS:
            gauges[series] /= sum(series in load.gauges for load in loads)
    return Load(gauges, _sum([load.counters for load in loads]), rates if known else None)


def quantile(buckets: Iterable[tuple[float, float]], share: float) -> Quantile | None:
    """As Prometheus estimates it: values lie evenly in their bucket. `buckets` are of bounds and how many do not exceed
    them; None where there are no values.
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


def _by_label(samples: Mapping[Series, float], name: str, label: str, **others: str) -> dict[str, float]:
    """The values of those that have the other labels; they are added up where there are still more labels."""
    found: dict[str, float] = {}
    for labels, value in _matching(samples, name):
        if others.items() <= labels.items():
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
