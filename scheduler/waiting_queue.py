"""The waiting queue: the order of admission, and which running choice is preempted."""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from scheduler.interface import BACKGROUND, Policy
from scheduler.request import Request

Party = TypeVar("Party", str, int)


class WaitingQueue(ABC):
    """A waiting order. Its head waits until it fits: smaller requests do not overtake it."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def push(self, request: Request) -> None:
        """Add a new choice."""

    def requeue(self, request: Request) -> None:
        """Put a preempted choice back, before all newer ones of its class."""
        self.push(request)

    @abstractmethod
    def peek(self) -> Request:
        """The head, which stays in the queue. The queue must not be empty."""

    @abstractmethod
    def pop(self) -> Request:
        """Remove and return the head for admission."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Remove a waiting choice from any position."""

    def rank(self, request: Request) -> tuple[int, ...]:
        """Sort key for preemption: the running choice with the highest rank gives way.

        The choice with the lowest rank always keeps its blocks, so that work always completes.
        """
        return (request.arrival,)

    def note_service(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:  # noqa: B027
        """Record service: `num_input` prompt tokens to be computed at admission, or `num_output` generated tokens.

        Most orders do not depend on it.
        """


class ArrivalQueue(WaitingQueue):
    """First come, first served. A preempted choice keeps its position in the arrival order."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []  # sorted by rank, which is unique

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        insort(self._waiting, request, key=self.rank)

    def peek(self) -> Request:
        return self._waiting[0]

    def pop(self) -> Request:
        return self._waiting.pop(0)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._waiting, self.rank(request), key=self.rank)
        if self._waiting[index : index + 1] != [request]:
            raise ValueError(f"{request.key!r} is not waiting")
        del self._waiting[index]


class PriorityQueue(ArrivalQueue):
    """Lowest priority number first, then first come, first served. Others can wait indefinitely."""

    def rank(self, request: Request) -> tuple[int, ...]:
        return (request.priority, request.arrival)


class _Lines(WaitingQueue, Generic[Party]):
    """A queue for each of several parties. Subclasses decide whose turn it is."""

    def __init__(self, make_line: Callable[[], WaitingQueue], party: Callable[[Request], Party]) -> None:
        """`make_line` creates the queue of a party; `party` returns the party that a choice belongs to."""
        self._make_line = make_line
        self._party: Callable[[Request], Party] = party
        self._lines: OrderedDict[Party, WaitingQueue] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return any(self._lines.values())

    def push(self, request: Request) -> None:
        self._line(request).push(request)

    def requeue(self, request: Request) -> None:
        self._line(request).requeue(request)

    def peek(self) -> Request:
        return self._lines[self._next()].peek()

    def pop(self) -> Request:
        party = self._next()
        request = self._lines[party].pop()
        self._leave(party)
        return request

    def remove(self, request: Request) -> None:
        party = self._party(request)
        self._lines[party].remove(request)
        self._leave(party)

    @abstractmethod
    def _next(self) -> Party:
        """The party of the head."""

    def _leave(self, party: Party) -> None:
        """A choice has left this party's queue, which is forgotten when it is empty."""
        if not self._lines[party]:
            del self._lines[party]

    def _line(self, request: Request) -> WaitingQueue:
        party = self._party(request)
        if party not in self._lines:
            self._lines[party] = self._make_line()
        return self._lines[party]


class TurnQueue(_Lines[str]):
    """Parties take turns, however many choices each has. Within a party: first come, first served."""

    def __init__(self, party: Callable[[Request], str]) -> None:
        super().__init__(ArrivalQueue, party)

    def requeue(self, request: Request) -> None:
        super().requeue(request)
        self._lines.move_to_end(self._party(request), last=False)  # its turn produced nothing, so it is returned

    def pop(self) -> Request:
        self._lines.move_to_end(party := self._next())
        request = self._lines[party].pop()
        self._leave(party)
        return request

    def _next(self) -> str:
        return next(iter(self._lines))


INPUT_COST = 1.0
"""Service cost of a computed prompt token."""
OUTPUT_COST = 2.0
"""Service cost of a generated token. Both are the paper's weights, which follow common prices."""


class FairShareQueue(_Lines[str]):
    """Serves the waiting client with the least service per weight (virtual token counter, arXiv:2401.00588).

    Each client's counter is its service divided by its weight. A client that returns after waiting for nothing is
    lifted to the lowest counter of the waiting clients, so unused service is not saved up. While two clients both wait,
    their service per weight differs by at most twice the greater of INPUT_COST * longest prompt and OUTPUT_COST * most
    running tokens, divided by the smaller weight (theorem 4.4).
    """

    def __init__(self, make_line: Callable[[], WaitingQueue]) -> None:
        """`make_line` creates the queue of one client."""
        super().__init__(make_line, lambda request: request.client)
        self._counters: dict[str, float] = {}
        self._last_to_leave = ""

    def push(self, request: Request) -> None:
        """A preempted choice is requeued instead: its client was not idle, so it is not lifted."""
        if request.client not in self._lines:
            self._lift(request.client)
        super().push(request)

    def note_service(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        service = INPUT_COST * num_input + OUTPUT_COST * num_output
        self._counters[request.client] = self._counters.get(request.client, 0.0) + service / request.weight

    def _next(self) -> str:
        """The client with the lowest counter. Ties go to the one that began to wait last, because it was lifted."""
        return min(reversed(self._lines), key=lambda client: self._counters.get(client, 0.0))

    def _lift(self, client: str) -> None:
        of_others = [self._counters.get(other, 0.0) for other in self._lines]
        least = min(of_others) if of_others else self._counters.get(self._last_to_leave, 0.0)
        self._counters[client] = max(self._counters.get(client, 0.0), least)

    def _leave(self, party: str) -> None:
        super()._leave(party)
        if party not in self._lines:
            self._last_to_leave = party


class TieredQueue(_Lines[int]):
    """Lowest tier first under every policy. Within a tier, its own queue decides."""

    def __init__(self, make_line: Callable[[], WaitingQueue]) -> None:
        """`make_line` creates the queue of one tier. It is kept when empty, because it may remember past service."""
        super().__init__(make_line, lambda request: request.tier)

    @property
    def num_background(self) -> int:
        """Waiting choices in background tiers."""
        return sum(len(line) for tier, line in self._lines.items() if tier >= BACKGROUND)

    def rank(self, request: Request) -> tuple[int, ...]:
        return (request.tier, *self._line(request).rank(request))

    def note_service(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        self._line(request).note_service(request, num_input=num_input, num_output=num_output)

    def _next(self) -> int:
        return min(tier for tier, line in self._lines.items() if line)

    def _leave(self, party: int) -> None:
        """Nothing is forgotten."""


def make_queue(policy: Policy) -> TieredQueue:
    """Create the queue for a policy; each tier gets its own."""
    lines: dict[Policy, Callable[[], WaitingQueue]] = {
        "fcfs": ArrivalQueue,
        "priority": PriorityQueue,
        "fair": lambda: FairShareQueue(_between_salts),
    }
    return TieredQueue(lines[policy])


def _between_salts() -> TurnQueue:
    """Turns between a client's salts, so that using more salts does not bring more service."""
    return TurnQueue(lambda request: request.cache_salt)
