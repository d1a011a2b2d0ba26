"""In which order waiting choices are admitted, and which running one makes room when the blocks run out."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
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
    """Parties take turns, whatever the number of choices behind each; within one, the order is that of its own line."""

    def __init__(self, party: Callable[[Request], str], make_line: Callable[[], WaitingQueue]) -> None:
        """`party` says whose turn a choice takes; `make_line` makes the line of one party."""
        self._party = party
        self._make_line = make_line
        self._turns: OrderedDict[str, WaitingQueue] = OrderedDict()  # only parties that wait, the next one first

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    def push(self, request: Request) -> None:
        self._line(request).push(request)

    def requeue(self, request: Request) -> None:
        self._line(request).requeue(request)
        self._turns.move_to_end(self._party(request), last=False)  # its turn brought nothing, so it is given back

    def peek(self) -> Request:
        return next(iter(self._turns.values())).peek()

    def pop(self) -> Request:
        party, line = next(iter(self._turns.items()))
        self._turns.move_to_end(party)
        request = line.pop()
        self._drop_if_empty(party)
        return request

    def remove(self, request: Request) -> None:
        party = self._party(request)
        self._turns[party].remove(request)
        self._drop_if_empty(party)

    def rank(self, request: Request) -> tuple[int, int]:
        return (0, request.arrival)

    def _line(self, request: Request) -> WaitingQueue:
        party = self._party(request)
        if party not in self._turns:
            self._turns[party] = self._make_line()
        return self._turns[party]

    def _drop_if_empty(self, party: str) -> None:
        if not self._turns[party]:
            del self._turns[party]


def make_queue(policy: Policy) -> WaitingQueue:
    """The queue of a policy's name."""
    queues: dict[Policy, Callable[[], WaitingQueue]] = {
        "fcfs": ArrivalQueue,
        "priority": PriorityQueue,
        "fair": _between_clients,
    }
    return queues[policy]()


def _between_clients() -> FairQueue:
    """Clients take turns, and the salts of one within its turns: more salts, which it chooses, bring it no more."""
    return FairQueue(lambda request: request.client, _between_salts)


def _between_salts() -> FairQueue:
    return FairQueue(lambda request: request.cache_salt, ArrivalQueue)
