"""Which replica gets a request: that which its prompt's beginning belongs to, unless it has too much to do.

Consistent hashing with bounded loads (arXiv:1608.01350), on rendezvous hashes: a replica that comes or goes moves only
the sessions that it gets or had.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LOAD_FACTOR = 1.25
"""A replica that has more than this multiple of the mean load gets only what belongs to it least."""
LEAST_BOUND = 8
"""Requests that every replica takes before that: a batch of so few is computed in little more time than one alone."""


_SENT_WITHIN_S = 5.0
"""A request for which a replica was chosen, and that was not sent by then, has been given up."""


@dataclass(frozen=True, slots=True)
class Place:
    """A replica."""

    name: str
    num_ongoing: int
    """Requests that it has."""
    is_ready: bool
    """False while its engine is replaced: it takes requests, but they wait."""


def by_preference(session: str, places: Sequence[Place]) -> list[Place]:
    """The replicas, the best first. Without a session that is the one with the fewest requests."""
    total = sum(place.num_ongoing for place in places)
    bound = max(LEAST_BOUND, math.ceil(LOAD_FACTOR * (total + 1) / max(1, len(places))))
    if not session:
        return sorted(places, key=lambda place: (not place.is_ready, place.num_ongoing))
    return sorted(
        places, key=lambda place: (not place.is_ready, place.num_ongoing >= bound, _distance(session, place.name))
    )


def _distance(session: str, name: str) -> bytes:
    return hashlib.blake2b(f"{session}/{name}".encode(), digest_size=8).digest()


class OngoingRequests:
    """Those that were sent to replicas from here and have not ended, with those that are about to be sent.

    What replicas tell of their queues comes late: of requests that come at once, none would know of the others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._chosen: dict[str, tuple[str, float]] = {}
        """Replica and time, by request, the oldest first: not sent yet."""
        self._sent: dict[str, str] = {}

    def choose(self, request: str, replica: str) -> None:
        """The request is about to be sent there."""
        self._chosen.pop(request, None)
        self._chosen[request] = replica, self._clock()

    def send(self, request: str, replica: str) -> None:
        """The replica has taken it."""
        self._chosen.pop(request, None)
        self._sent[request] = replica

    def end(self, request: str) -> None:
        """It has ended, however it did."""
        self._chosen.pop(request, None)
        self._sent.pop(request, None)

    def counts(self) -> Counter[str]:
        """By replica."""
        given_up = self._clock() - _SENT_WITHIN_S
        while self._chosen and next(iter(self._chosen.values()))[1] < given_up:
            del self._chosen[next(iter(self._chosen))]
        return Counter(self._sent.values()) + Counter(replica for replica, _ in self._chosen.values())
