"""What is counted of every token."""

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from server.telemetry.families import Families

_BETWEEN_TOKENS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)


class GeneratedTokens(Collector):
    """Counts the tokens and the time between them. A counter and a histogram of the library would take as long for each
    token as all else that is done for it.
    """

    def __init__(self, families: Families) -> None:
        self._families = families
        self._num_tokens = 0
        self._counts = [0] * (len(_BETWEEN_TOKENS_S) + 1)
        self._seconds = 0.0

    def observe(self, count: int, seconds: float | None) -> None:
        """`count` tokens of a choice came together, `seconds` after the ones before; None for the first."""
        self._num_tokens += count
        if seconds is not None:
            self._counts[bisect_left(_BETWEEN_TOKENS_S, seconds / count)] += count
            self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        yield self._families.counter("generation_tokens", "Tokens generated.", self._num_tokens)
        name, text = "inter_token_latency_seconds", "Between tokens of a choice."
        yield self._families.histogram(name, text, _BETWEEN_TOKENS_S, self._counts, self._seconds)
