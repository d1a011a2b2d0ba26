"""Tiers, each of which waits for those before it."""

from collections.abc import Callable

from scheduler.interface import BACKGROUND
from scheduler.queues.interface import WaitingQueue
from scheduler.request import Request


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
