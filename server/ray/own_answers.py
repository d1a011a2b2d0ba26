"""What the ingress answers by itself, mostly errors: counted and logged as replicas do it with what they answer."""

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from starlette.routing import Match
from starlette.types import Scope

from server.api.dialect import Dialect
from server.http.middleware import log_access, record_in
from server.telemetry.metrics import Families, HttpRequests


class OwnAnswers:
    """Those of one process. No replica knows of them, so they would be missed just when replicas die."""

    def __init__(self, name: str, prefix: str) -> None:
        """`name` stands where replicas have theirs; `prefix` is that of all metrics."""
        self._name = name
        self._registry = CollectorRegistry()
        self._requests = HttpRequests(Families(prefix, ""), self._registry)

    def note(self, scope: Scope, dialect: Dialect, status: int) -> None:
        """A request of this dialect's paths is over. Of a stream that broke off, the status is that of the error."""
        route = _route(scope, dialect)
        record = record_in(scope)
        record.status = status
        self._requests.observe(scope["method"], route, status)
        log_access(scope, route, record)

    def metrics(self) -> tuple[str, list[Metric]]:
        """The name, and what was counted."""
        return self._name, list(self._registry.collect())


def _route(scope: Scope, dialect: Dialect) -> str:
    """The path with the names of what varies in it; a route that takes other methods will do."""
    matches = [(route.matches(scope)[0].value, getattr(route, "path", "")) for route in dialect.router.routes]
    return max((match for match in matches if match[0] != Match.NONE.value), default=(0, "unmatched"))[1]
