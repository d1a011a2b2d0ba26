"""Fair share between clients, by the service that each has got (Sheng et al., arXiv:2401.00588)."""

from collections.abc import Callable

from scheduler.queues.interface import WaitingQueue
from scheduler.request import Request

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
