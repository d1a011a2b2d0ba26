"""Waiting in the order of arrival."""

from bisect import bisect_left, insort

from scheduler.request import Request


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
