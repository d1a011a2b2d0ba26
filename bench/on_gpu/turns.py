"""Measures alternatives alternately, so that disturbances affect all of them. A failure ends only its own turns."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


def _nothing() -> None:
    """Do nothing."""


class Turns(Generic[Result]):
    """The turns of one alternative."""

    def __init__(
        self, step: Callable[[], Result], begin: Callable[[], None] = _nothing, end: Callable[[], None] = _nothing
    ) -> None:
        """`step` is measured; `begin` is called before the first step and `end` after the last or after an error."""
        self._step = step
        self._begin = begin
        self._end = end
        self.results: list[Result] = []
        self.error: Exception | None = None
        """The exception that ended the turns, if any."""

    def take(self) -> None:
        """Run and record one step, unless an earlier one failed."""
        self._guarded(lambda: self.results.append(self._step()))

    def begin(self) -> None:
        """Prepare the first step. Call it once."""
        self._guarded(self._begin)

    def end(self) -> None:
        """Clean up, unless an error already did. Call it once."""
        if self.error is None:
            self._end()

    def _guarded(self, action: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001  (a failure must not end the other alternative)
            traceback.clear_frames(error.__traceback__)  # frees tensors whose memory the other may need
            self.error = error
            self._end()


def take_turns(contenders: Sequence[Turns[Any]], count: int) -> None:
    """Run `count` steps of each alternative, alternately."""
    for one in contenders:
        one.begin()
    for _ in range(count):
        for one in contenders:
            one.take()
    for one in contenders:
        one.end()
