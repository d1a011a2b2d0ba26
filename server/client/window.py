"""How fast the numbers of a server have grown lately. No I/O in here."""

from collections import deque
from functools import lru_cache
from itertools import pairwise

from server.client.snapshot import Samples, Series, Snapshot, Source

_OF_HISTOGRAMS = ("_bucket", "_count", "_sum")


class Window:
    """The last snapshots of one address, as many as reach back for some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._snapshots: deque[Snapshot] = deque()

    @property
    def latest(self) -> Snapshot | None:
        return self._snapshots[-1] if self._snapshots else None

    @property
    def seconds(self) -> float:
        """From the first to the last."""
        return self._snapshots[-1].at - self._snapshots[0].at if self._snapshots else 0.0

    def add(self, snapshot: Snapshot) -> None:
        """The newest; what is older than it has to be is dropped."""
        self._snapshots.append(snapshot)
        while len(self._snapshots) > 2 and snapshot.at - self._snapshots[1].at >= self._seconds:
            self._snapshots.popleft()

    def clear(self) -> None:
        """Rates over a time in which the server was away would mean nothing."""
        self._snapshots.clear()

    def rates(self, source: Source) -> dict[Series, float] | None:
        """What its counters gained a second while it was seen, never less than 0; None until it was seen twice."""
        seen = [snapshot for snapshot in self._snapshots if source in snapshot.sources]
        seconds = seen[-1].at - seen[0].at if seen else 0.0
        if seconds <= 0:
            return None
        gained: dict[Series, float] = {}
        for before, after in pairwise(snapshot.sources[source] for snapshot in seen):
            for series, value in _increase(before, after).items():
                gained[series] = gained.get(series, 0.0) + value
        return {series: value / seconds for series, value in gained.items()}


def _increase(before: Samples, after: Samples) -> dict[Series, float]:
    """What another process counted, it counted since. Within one, a series that is new counts from now on: the page may
    have left it out before. One that has become less has begun at 0 again, and all of a histogram with any part of it.
    """
    now, then = after.counters, before.counters
    if before.started != after.started:
        return now
    restarted = {_whole(series) for series, value in now.items() if value < then.get(series, 0.0)}
    return {
        series: value if _whole(series) in restarted else value - then.get(series, value)
        for series, value in now.items()
    }


@lru_cache(maxsize=8192)
def _whole(series: Series) -> Series:
    """The same for all parts of a histogram."""
    name, labels = series
    for suffix in _OF_HISTOGRAMS:
        name = name.removesuffix(suffix)
    return name, tuple((label, value) for label, value in labels if label != "le")
