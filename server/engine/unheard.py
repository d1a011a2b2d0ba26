"""What an engine has been asked for and has not told yet."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from scheduler.history import ChoiceHistory
from scheduler.interface import RequestOutput
from server.engine.follower import Follower


class Unheard:
    """The ends of aborted choices, and the answers to questions about requests."""

    def __init__(self) -> None:
        self._aborted: dict[str, dict[int, Follower]] = {}
        """By request and choice."""
        self._explanations: dict[str, asyncio.Future[Sequence[ChoiceHistory]]] = {}

    def expect(self, request_id: str, choices: Iterable[int], follower: Follower) -> None:
        """These choices were aborted in the engine."""
        self._aborted.setdefault(request_id, {}).update(dict.fromkeys(choices, follower))

    def is_expected(self, request_id: str) -> bool:
        """Whether choices of it were aborted of which the engine has told nothing yet."""
        return request_id in self._aborted

    def hear_of(self, output: RequestOutput) -> None:
        """An output that nobody waits for any more; it may be the end of a choice that was to be aborted."""
        if output.finish_reason is not None:
            self._tell(output.request_id, output.choice, output.history)

    def hear_of_abort(self, request_id: str, choice: int | None, histories: Iterable[ChoiceHistory]) -> None:
        """One choice runs no longer, or none does: these are the ends of those that did."""
        for history in histories:
            self._tell(request_id, history.choice, history)
        for one in list(self._aborted.get(request_id, ())) if choice is None else [choice]:
            self._tell(request_id, one, None)

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
        for request_id in list(self._aborted):
            self.hear_of_abort(request_id, None, ())
        for request_id in list(self._explanations):
            self.hear_explanation(request_id, ())

    def _tell(self, request_id: str, choice: int, history: ChoiceHistory | None) -> None:
        followers = self._aborted.get(request_id, {})
        if (follower := followers.pop(choice, None)) is None:
            return
        if not followers:
            del self._aborted[request_id]
        follower.ended(choice, history)
