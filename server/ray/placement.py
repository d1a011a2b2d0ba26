"""Which replica gets a request: the one that its session belongs to, unless that is overloaded.

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
"""A replica with more than this multiple of the mean load is chosen only if all others are, too."""
LEAST_BOUND = 8
"""Requests that every replica takes in any case: a batch of so few takes little more time than one request."""


_SENT_WITHIN_S = 5.0
"""A request that was not sent within this time after the choice has been given up."""


@dataclass(frozen=True, slots=True)
class Place:
    """A replica."""

    name: str
    num_ongoing: int
    """Requests on this replica."""
    is_ready: bool
    """False while its engine is replaced: it takes requests, but they wait."""


def by_preference(session: str, places: Sequence[Place]) -> list[Place]:
    """The replicas, best first; without a session, by their numbers of requests."""
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
    """Requests that this process has sent to replicas or is about to send, and that have not ended.

    What replicas report of their queues comes late: simultaneous requests would not know of each other.
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
