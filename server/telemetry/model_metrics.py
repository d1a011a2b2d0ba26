"""Metrics of one of several models: how often it was loaded and unloaded, who waits for it and its memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from server.models.hosted_model import HostedModel, Leaving
from server.models.residence import Standing

if TYPE_CHECKING:
    from server.telemetry.metrics import Families


class ResidenceCollector(Collector):
    """Collects what the host of models knows of one of them."""

    def __init__(self, model: HostedModel, families: "Families") -> None:
        self._model = model
        self._families = families

    def collect(self) -> Iterator[Metric]:
        make, model = self._families, self._model
        yield make.counter("model_loads", "Times that the model was loaded. Several models only.", model.num_loads)
        text = "Time that these loads took. Several models only."
        yield make.counter("model_load_seconds", text, model.loads_s)
        text = "Times that the model was unloaded, or could not be loaded, by reason. Several models only."
        reasons: dict[tuple[str, ...], float] = {(reason.value,): model.unloads[reason] for reason in Leaving}
        yield make.counters("model_unloads", text, ["reason"], reasons)
        text = "Requests that wait until the model is loaded. Several models only."
        yield make.gauge("model_requests_waiting", text, len(model.waiters))
        status = model.status
        reserved = status.num_bytes if status.standing is not Standing.UNLOADED else 0
        text = "Memory that is reserved for the model, 0 while it is not loaded. Several models only."
        yield make.gauge("model_reserved_bytes", text, reserved or 0)
