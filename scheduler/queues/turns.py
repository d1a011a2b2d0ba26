"""Turns between parties."""

from collections import OrderedDict
from collections.abc import Callable

from scheduler.queues.arrival import ArrivalQueue
from scheduler.request import Request


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
