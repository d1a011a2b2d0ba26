"""Tokens per second over the last minute, from metrics."""

from collections import deque

from server.client import formats
from server.client.load import Load
from server.page.load.shapes import Chart, Series, chart

SECONDS = 60
_SERIES = (("prompt", "in", "prompt_tokens_total"), ("decode", "out", "generation_tokens_total"))


class Throughput:
    """One reading a second."""

    def __init__(self) -> None:
        self._rates: deque[tuple[float, ...]] = deque([(0.0,) * len(_SERIES)] * SECONDS, maxlen=SECONDS)
        self._is_told = False

    def add(self, load: Load) -> None:
        """The latest."""
        self._is_told = all(load.tells(metric) for _, _, metric in _SERIES)
        self._rates.append(tuple(load.rate(metric) or 0.0 for _, _, metric in _SERIES))

    def chart(self) -> Chart | None:
        """None where the server does not count tokens."""
        if not self._is_told:
            return None
        of_series = zip(_SERIES, zip(*self._rates, strict=True), strict=True)
        series = [
            Series(kind, name, formats.rate(rates[-1]), [round(rate, 1) for rate in rates])
            for (kind, name, _), rates in of_series
        ]
        return chart("Tokens per second", series)
