"""What the scheduler asks of the waiting order."""

from typing import Protocol

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
