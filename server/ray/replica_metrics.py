"""One page of metrics of all replicas: what each of them says, with its name as a further label."""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


def render(of_replicas: Iterable[tuple[str, Sequence[Metric]]]) -> bytes:
    """The exposition format of Prometheus, of pairs of a replica's name and its metrics."""
    registry = CollectorRegistry()
    registry.register(_Merged(of_replicas))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, of_replicas: Iterable[tuple[str, Sequence[Metric]]]) -> None:
        self._families: dict[str, Metric] = {}
        for replica, metrics in of_replicas:
            for metric in metrics:
                family = self._families.setdefault(metric.name, _empty(metric))
                family.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica}) for sample in metric.samples
                ]

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()


def _empty(metric: Metric) -> Metric:
    family = copy(metric)
    family.samples = []
    return family
