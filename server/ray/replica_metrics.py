"""One page of metrics of all replicas: what each of them says, with its name as a further label."""

from collections.abc import Iterable, Sequence
from copy import copy

from prometheus_client.core import Metric


def merged(of_replicas: Iterable[tuple[str, Sequence[Metric]]]) -> list[Metric]:
    """Each metric once, of pairs of a replica's name and its metrics."""
    families: dict[str, Metric] = {}
    for replica, metrics in of_replicas:
        for metric in metrics:
            family = families.setdefault(metric.name, _empty(metric))
            family.samples += [
                sample._replace(labels={**sample.labels, "replica": replica}) for sample in metric.samples
            ]
    return list(families.values())


def _empty(metric: Metric) -> Metric:
    family = copy(metric)
    family.samples = []
    return family
