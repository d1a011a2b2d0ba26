"""The queue of waiting choices: in which order they are admitted, and which running choice is preempted."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from scheduler.interface import BACKGROUND, Policy
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

    def rank(self, request: Request) -> tuple[int, ...]:
        """Which running choice makes room: the one with the highest rank, the newest of those that matter least.

        The one with the lowest always keeps what it has, so that work always completes.
        """
        ...

    def note_service(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        """A choice that was admitted gets so many tokens of its prompt computed, or has got so many of output."""
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

    def rank(self, request: Request) -> tuple[int, ...]:
        return (request.arrival,)

    def note_service(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        """Decides nothing here."""


class PriorityQueue(ArrivalQueue):
    """Lower priority numbers first, then first come, first served. Low priorities wait for as long as others come."""

    def rank(self, request: Request) -> tuple[int, ...]:
        return (request.priority, request.arrival)


class TurnQueue:
    """Parties take turns, whatever the number of choices behind each; within one, first come is first served."""

    def __init__(self, party: Callable[[Request], str]) -> None:
        """`party` says whose turn a choice takes."""
        self._party = party
        self._turns: OrderedDict[str, ArrivalQueue] = OrderedDict()  # only parties that wait, the next one first

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

    def rank(self, request: Request) -> tuple[int, ...]:
        return (request.arrival,)

    def note_service(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        """A turn is a turn."""

    def _line(self, request: Request) -> ArrivalQueue:
        return self._turns.setdefault(self._party(request), ArrivalQueue())

    def _drop_if_empty(self, party: str) -> None:
        if not self._turns[party]:
            del self._turns[party]


INPUT_COST = 1.0
"""Service that a computed token of a prompt is, and ..."""
OUTPUT_COST = 2.0
"""... that a token of output is: the paper's weights, after usual prices."""


class FairShareQueue:
    """Of the clients that wait, the one that has got the least service for its weight is next.

    Each has a virtual token counter: service divided by weight. One that had nothing waiting and comes back has its
    counter lifted to the least of those that wait: nobody saves up service for later. While two clients wait all the
    time, what both get in any interval differs, divided by their weights, by at most twice the greater of INPUT_COST *
    longest prompt and OUTPUT_COST * most tokens that run at a time, divided by the smaller weight (theorem 4.4).
    """

    def __init__(self, make_line: Callable[[], WaitingQueue]) -> None:
        """`make_line` makes the line of one client."""
        self._make_line = make_line
        self._lines: dict[str, WaitingQueue] = {}  # only of clients that wait
        self._counters: dict[str, float] = {}
        self._last_to_leave = ""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def push(self, request: Request) -> None:
        if request.client not in self._lines:
            self._lift(request.client)
        self._line(request.client).push(request)

    def requeue(self, request: Request) -> None:
        self._line(request.client).requeue(request)  # without a lift: its client was not idle

    def peek(self) -> Request:
        return self._lines[self._next()].peek()

    def pop(self) -> Request:
        client = self._next()
        request = self._lines[client].pop()
        self._drop_if_empty(client)
        return request

    def remove(self, request: Request) -> None:
        self._lines[request.client].remove(request)
        self._drop_if_empty(request.client)

    def rank(self, request: Request) -> tuple[int, ...]:
        return (request.arrival,)

    def note_service(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        service = INPUT_COST * num_input + OUTPUT_COST * num_output
        self._counters[request.client] = self._counters.get(request.client, 0.0) + service / request.weight

    def _next(self) -> str:
        """Of several with the same counter, the one that began to wait last: it was lifted to the others."""
        return min(reversed(self._lines), key=lambda client: self._counters.get(client, 0.0))

    def _lift(self, client: str) -> None:
        of_others = [self._counters.get(other, 0.0) for other in self._lines]
        least = min(of_others) if of_others else self._counters.get(self._last_to_leave, 0.0)
        self._counters[client] = max(self._counters.get(client, 0.0), least)

    def _line(self, client: str) -> WaitingQueue:
        if client not in self._lines:
            self._lines[client] = self._make_line()
        return self._lines[client]

    def _drop_if_empty(self, client: str) -> None:
        if not self._lines[client]:
            del self._lines[client]
            self._last_to_leave = client


class TieredQueue:
    """Lower tiers first, whatever the policy; within one, the order is that of its own line."""

    def __init__(self, make_line: Callable[[], WaitingQueue]) -> None:
        """`make_line` makes the line of one tier, which stays: it may remember whom it has served."""
        self._make_line = make_line
        self._lines: dict[int, WaitingQueue] = {}  # in the order of tiers

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return any(self._lines.values())

    @property
    def num_background(self) -> int:
        """Those that only get the room that others leave."""
        return sum(len(line) for tier, line in self._lines.items() if tier >= BACKGROUND)

    def push(self, request: Request) -> None:
        self._line(request).push(request)

    def requeue(self, request: Request) -> None:
        self._line(request).requeue(request)

    def peek(self) -> Request:
        return self._first().peek()

    def pop(self) -> Request:
        return self._first().pop()

    def remove(self, request: Request) -> None:
        self._line(request).remove(request)

    def rank(self, request: Request) -> tuple[int, ...]:
        return (request.tier, *self._line(request).rank(request))

    def note_service(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        self._line(request).note_service(request, num_input=num_input, num_output=num_output)

    def _first(self) -> WaitingQueue:
        return next(line for line in self._lines.values() if line)

    def _line(self, request: Request) -> WaitingQueue:
        if request.tier not in self._lines:
            self._lines[request.tier] = self._make_line()
            self._lines = dict(sorted(self._lines.items()))
        return self._lines[request.tier]


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
