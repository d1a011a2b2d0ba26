"""Makes what is told to Prometheus when it asks, with the prefix and the label that all of it has."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


def exposition(metrics: Iterable[Metric], *, of_tenants: bool) -> bytes:
    """The metrics in Prometheus's text format, with or without those that say what each tenant has used."""
    return generate_latest(_Page([one for one in metrics if of_tenants or not _tells_tenants_apart(one)]))


def _tells_tenants_apart(metric: Metric) -> bool:
    return any("tenant" in sample.labels for sample in metric.samples)


class _Page(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        return self._metrics


class Families:
    """Makes metrics of one application. Their names are told without prefix; `model_name` is a label of each."""

    def __init__(self, prefix: str, model: str) -> None:
        self.model = model
        self._prefix = prefix

    def name(self, name: str) -> str:
        """With the prefix."""
        return f"{self._prefix}:{name}"

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """A number that goes up and down."""
        return self.gauges(name, text, (), {(): value})

    def gauges(self, name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> Metric:
        """Several by what the labels say, perhaps none."""
        family = GaugeMetricFamily(self.name(name), text, labels=["model_name", *labels])
        for of, value in values.items():
            family.add_metric([self.model, *of], value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """A number that only grows, until a restart; its name gets `_total`."""
        return self.counters(name, text, (), {(): value})

    def counters(self, name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> Metric:
        """Several by what the labels say, perhaps none."""
        family = CounterMetricFamily(self.name(name), text, labels=["model_name", *labels])
        for of, value in values.items():
            family.add_metric([self.model, *of], value)
        return family

    def histogram(self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
        """`counts` of the values up to each bound but no lower one, and of those above all; `total` is their sum."""
        family = HistogramMetricFamily(self.name(name), text, labels=["model_name"])
        names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        family.add_metric([self.model], list(zip(names, accumulate(counts), strict=True)), total)
        return family


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpRequests:
    """By method, route and status; clients can make up methods, so what is none of the usual ones is `other`."""

    def __init__(self, families: Families, registry: CollectorRegistry) -> None:
        name = families.name("http_requests")
        self._counter = Counter(name, "HTTP requests.", ["method", "handler", "status"], registry=registry)

    def observe(self, method: str, handler: str, status: int) -> None:
        """One of them is over."""
        self._counter.labels(method if method in _METHODS else "other", handler, str(status)).inc()
