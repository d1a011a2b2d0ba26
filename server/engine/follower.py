"""How it is told what became of requests, beside their outputs."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from scheduler.history import ChoiceHistory
from scheduler.interface import RequestOutput


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


class Unheard:
    """Histories that an engine has been asked for and has not told yet."""

    def __init__(self) -> None:
        self._aborted: dict[tuple[str, int], Follower] = {}
        self._explanations: dict[str, asyncio.Future[Sequence[ChoiceHistory]]] = {}

    def expect(self, request_id: str, choices: Iterable[int], follower: Follower) -> None:
        """These choices were aborted in the engine."""
        self._aborted.update(((request_id, choice), follower) for choice in choices)

    def hear_of(self, output: RequestOutput) -> None:
        """An output that nobody waits for any more; it may be the end of a choice that was to be aborted."""
        if output.finish_reason is not None:
            self._tell((output.request_id, output.choice), output.history)

    def hear_of_abort(self, request_id: str, choice: int | None, histories: Iterable[ChoiceHistory]) -> None:
        """One choice runs no longer, or none does: these are the ends of those that did."""
        for history in histories:
            self._tell((request_id, history.choice), history)
        for key in [key for key in self._aborted if key[0] == request_id and choice in (None, key[1])]:
            self._tell(key, None)

    def ask(self, request_id: str, send: Callable[[], None]) -> Awaitable[Sequence[ChoiceHistory]]:
        """What the engine says of a request; nothing if it dies meanwhile. `send` asks it, unless it has been asked."""
        if request_id not in self._explanations:
            self._explanations[request_id] = asyncio.get_running_loop().create_future()
            send()
        return asyncio.shield(self._explanations[request_id])

    def hear_explanation(self, request_id: str, histories: Sequence[ChoiceHistory]) -> None:
        """What the engine says of a request."""
        if (waiting := self._explanations.pop(request_id, None)) is not None:
            waiting.set_result(histories)

    def hear_no_more(self) -> None:
        """The engine has ended."""
        for key in list(self._aborted):
            self._tell(key, None)
        for request_id in list(self._explanations):
            self.hear_explanation(request_id, ())

    def _tell(self, key: tuple[str, int], history: ChoiceHistory | None) -> None:
        if (follower := self._aborted.pop(key, None)) is not None:
            follower.ended(key[1], history)
