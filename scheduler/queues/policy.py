"""The waiting order by its name."""

from collections.abc import Callable

from scheduler.config import Policy
from scheduler.queues.arrival import ArrivalQueue, PriorityQueue
from scheduler.queues.fair_share import FairShareQueue
from scheduler.queues.interface import WaitingQueue
from scheduler.queues.tiers import TieredQueue
from scheduler.queues.turns import TurnQueue


def make_queue(policy: Policy) -> TieredQueue:
    """The queue of a policy's name, for each tier."""
    lines: dict[Policy, Callable[[], WaitingQueue]] = {
        "fcfs": ArrivalQueue,
        "priority": PriorityQueue,
        "fair": lambda: FairShareQueue(_between_salts),
    }
    return TieredQueue(lines[policy])


def _between_salts() -> TurnQueue:
    """The salts of a client take turns within its share: more of them, which it chooses, bring it no more."""
    return TurnQueue(lambda request: request.cache_salt)
