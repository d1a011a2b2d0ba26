"""Chooses a replica for a request: its session's replica, unless that is overloaded.

Consistent hashing with bounded loads (arXiv:1608.01350) on rendezvous hashes: adding or removing a replica moves only
that replica's sessions.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LOAD_FACTOR = 1.25
"""A replica above this multiple of the mean load is overloaded: chosen only if all replicas are."""
LEAST_BOUND = 8
"""Requests below which a replica is never overloaded: so small a batch takes little more time than one request."""


_SENT_WITHIN_S = 5.0
"""A request that is not sent within this time after its replica was chosen is assumed to be abandoned."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica's load and state."""

    name: str
    num_ongoing: int
    """Requests in flight on the replica."""
    is_ready: bool
    """False while the engine restarts: the replica accepts requests, but they wait."""


def ranked_replicas(session: str, states: Sequence[ReplicaState]) -> list[ReplicaState]:
    """The replicas, best first; without a session, those with the fewest requests first."""
    total = sum(state.num_ongoing for state in states)
    bound = max(LEAST_BOUND, math.ceil(LOAD_FACTOR * (total + 1) / max(1, len(states))))
    if not session:
        return sorted(states, key=lambda state: (not state.is_ready, state.num_ongoing))
    return sorted(
        states, key=lambda state: (not state.is_ready, state.num_ongoing >= bound, _distance(session, state.name))
    )


def _distance(session: str, name: str) -> bytes:
    return hashlib.blake2b(f"{session}/{name}".encode(), digest_size=8).digest()


class OngoingRequests:
    """Unfinished requests that this process has sent to replicas or is about to send.

    The replicas' own reports arrive too late to balance simultaneous requests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._chosen: dict[str, tuple[str, float]] = {}
        """Replica and time by request, oldest first: chosen but not sent yet."""
        self._sent: dict[str, str] = {}

    def choose(self, request: str, replica: str) -> None:
        """Note that the request is about to be sent to the replica."""
        self._chosen.pop(request, None)
        self._chosen[request] = replica, self._clock()

    def send(self, request: str, replica: str) -> None:
        """Note that the replica has accepted the request."""
        self._chosen.pop(request, None)
        self._sent[request] = replica

    def end(self, request: str) -> None:
        """Note that the request has ended, successfully or not."""
        self._chosen.pop(request, None)
        self._sent.pop(request, None)

    def counts(self) -> Counter[str]:
        """Number of ongoing requests by replica."""
        given_up = self._clock() - _SENT_WITHIN_S
        while self._chosen and next(iter(self._chosen.values()))[1] < given_up:
            del self._chosen[next(iter(self._chosen))]
        return Counter(self._sent.values()) + Counter(replica for replica, _ in self._chosen.values())
