"""Which replica gets a request: that which its prompt's beginning belongs to, unless it has too much to do.

Consistent hashing with bounded loads (arXiv:1608.01350), on rendezvous hashes: a replica that comes or goes moves only
the sessions that it gets or had.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

LOAD_FACTOR = 1.25
"""A replica that has more than this multiple of the mean load gets only what belongs to it least."""
LEAST_BOUND = 8
"""Requests that every replica takes before that: a batch of so few is computed in little more time than one alone."""


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
