"""Makes what is told to Prometheus when it asks, with the prefix and the label that all of it has."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric


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
