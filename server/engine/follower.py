"""Who is told what became of requests, beside their outputs."""

from typing import Protocol

from scheduler.history import ChoiceHistory


class Follower(Protocol):
    """Told what became of a request. Nothing waits for it, and it must not fail."""

    def ended(self, choice: int, history: ChoiceHistory | None) -> None:
        """One choice has ended; each does once. This may come after its stream was closed.

        `history` is that of the last engine, or None if no engine has any: it never had the choice, or died with it.
        """
        ...

    def interrupted(self) -> None:
        """The engine died with it. It goes on in the next one."""
        ...
