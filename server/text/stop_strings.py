"""Search for stop strings in a growing text."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopSearch:
    """The text that may be returned now, and the stop string that ended it, if any."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first stop string in a growing text, and holds back text that could begin one.

    The first is the one that completes first; of several that end together, the longest. So the result does not depend
    on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> StopSearch:
        """Add a piece of text. With `armed` False, stop strings that end in this piece are ignored."""
        buffer = self._held + text
        found = self._first_match(buffer, len(self._held)) if armed and self._stops else None
        if found is not None:
            start, stop = found
            self._held = ""
            return StopSearch(buffer[: start + len(stop) if self._include_stop else start], stop)
        shown = len(buffer) - self._longest_beginning(buffer)
        self._held = buffer[shown:]
        return StopSearch(buffer[:shown])

    def flush(self) -> str:
        """The text held back, when no more text follows."""
        rest, self._held = self._held, ""
        return rest

    def _first_match(self, buffer: str, num_old: int) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first, among those that end in the new part of the buffer."""
        matches = []
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), -len(stop), start, stop))
        return min(matches)[2:] if matches else None

    def _longest_beginning(self, buffer: str) -> int:
        """Number of characters at the end of the buffer that could begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(buffer)), 0, -1):
            tail = buffer[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
