"""The metrics of a server, without one."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from server.client.metrics import Snapshot, parse

BOUNDS = (0.01, 0.1, 1.0, 10.0)


class Metrics:
    """A server's metrics, made with Prometheus' own library."""

    def __init__(self, prefix: str = "samewise", engines: tuple[str, ...] = ("0",), started: float = 1.0) -> None:
        self._registry = CollectorRegistry()
        self._prefix = prefix
        self._known: dict[str, Counter | Gauge | Histogram] = {}
        self._engines = engines
        Gauge("process_start_time_seconds", "x", registry=self._registry).set(started)
        for engine in engines:
            self.gauge("num_requests_running", 0, engine=engine)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self._metric(Gauge, name, labels).set(value)

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        self._metric(Counter, name, labels).inc(value)

    def observe(self, name: str, *values: float, bounds: tuple[float, ...] = BOUNDS) -> None:
        for value in values:
            self._metric(Histogram, name, {}, buckets=bounds).observe(value)

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> list[Metric]:
        return list(self._registry.collect())

    def snapshot(self, at: float) -> Snapshot:
        return parse(self.text(), at)

    def _metric(self, kind, name, labels, **options):
        labels = {"model_name": "m", "engine": self._engines[0], **labels}
        if name not in self._known:
            full = f"{self._prefix}:{name}"
            self._known[name] = kind(full, "x", list(labels), registry=self._registry, **options)
        return self._known[name].labels(**labels)
