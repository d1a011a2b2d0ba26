"""Counts HTTP requests, for whoever answers them: the server, or what stands before several."""

from prometheus_client import CollectorRegistry, Counter

from server.telemetry.families import Families

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpRequests:
    """By method, route and status; clients can make up methods, so what is none of the usual ones is `other`."""

    def __init__(self, families: Families, registry: CollectorRegistry) -> None:
        name = families.name("http_requests")
        self._counter = Counter(name, "HTTP requests.", ["method", "handler", "status"], registry=registry)

    def observe(self, method: str, handler: str, status: int) -> None:
        """One of them is over."""
        self._counter.labels(method if method in _METHODS else "other", handler, str(status)).inc()
