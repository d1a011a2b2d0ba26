"""In which order waiting choices are admitted, and which running one makes room when the blocks run out."""

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Protocol

from scheduler.config import Policy
from scheduler.request import Request


class WaitingQueue(Protocol):
    """The waiting order as a policy. Its head waits until it fits: nothing overtakes it for being smaller."""

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Line up a new choice."""
        ...

    def requeue(self, request: Request) -> None:
        """Line up a preempted choice, before all newer ones of its class."""
        ...

    def peek(self) -> Request:
        """The head, which stays; the queue must not be empty."""
        ...

    def pop(self) -> Request:
        """Take the head out, because it is admitted."""
        ...

    def remove(self, request: Request) -> None:
        """Take out a waiting choice, wherever it stands."""
        ...

    def rank(self, request: Request) -> tuple[int, int]:
        """Which running choice makes room: the one with the highest rank, the newest of those that matter least.

        The one with the lowest always keeps what it has, so that work always completes.
        """
        ...


class ArrivalQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []  # sorted by rank, which is unique

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        insort(self._waiting, request, key=self.rank)

    def requeue(self, request: Request) -> None:
        self.push(request)  # it kept its place in the order of arrival

    def peek(self) -> Request:
        return self._waiting[0]

    def pop(self) -> Request:
        return self._waiting.pop(0)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._waiting, self.rank(request), key=self.rank)
        if self._waiting[index : index + 1] != [request]:
            raise ValueError(f"{request.key!r} is not waiting")
        del self._waiting[index]

    def rank(self, request: Request) -> tuple[int, int]:
        return (0, request.arrival)


class PriorityQueue(ArrivalQueue):
    """Lower priority numbers first, then first come, first served. Low priorities wait for as long as others come."""

    def rank(self, request: Request) -> tuple[int, int]:
        return (request.priority, request.arrival)


class FairQueue:
    """Cache salts take turns, whatever the number of choices behind each; first come, first served within a salt."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, ArrivalQueue] = OrderedDict()  # only salts that wait, the next one first

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    def push(self, request: Request) -> None:
        self._turns.setdefault(request.cache_salt, ArrivalQueue()).push(request)

    def requeue(self, request: Request) -> None:
        self.push(request)
        self._turns.move_to_end(request.cache_salt, last=False)  # its turn brought nothing, so it is given back

    def peek(self) -> Request:
        return next(iter(self._turns.values())).peek()

    def pop(self) -> Request:
        request = self.peek()
        self._turns.move_to_end(request.cache_salt)
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        queue = self._turns[request.cache_salt]
        queue.remove(request)
        if not queue:
            del self._turns[request.cache_salt]

    def rank(self, request: Request) -> tuple[int, int]:
        return (0, request.arrival)


def make_queue(policy: Policy) -> WaitingQueue:
    """The queue of a policy's name."""
    queues: dict[Policy, type[WaitingQueue]] = {"fcfs": ArrivalQueue, "priority": PriorityQueue, "fair": FairQueue}
    return queues[policy]()
