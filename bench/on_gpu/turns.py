"""Two that are measured in turns, so that what the machine does meanwhile hits both; what fails ends its own turns."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


def _nothing() -> None:
    """There is nothing to do."""


class Turns(Generic[Result]):
    """One of them."""

    def __init__(
        self, step: Callable[[], Result], begin: Callable[[], None] = _nothing, end: Callable[[], None] = _nothing
    ) -> None:
        """`step` is what is measured; `begin` comes before the first and `end` after the last, or after an error."""
        self._step = step
        self._begin = begin
        self._end = end
        self.results: list[Result] = []
        self.error: Exception | None = None
        """What it raised."""

    def take(self) -> None:
        """A step."""
        self._guarded(lambda: self.results.append(self._step()))

    def begin(self) -> None:
        """To be called once."""
        self._guarded(self._begin)

    def end(self) -> None:
        """To be called once."""
        if self.error is None:
            self._end()

    def _guarded(self, action: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001  (the other is worth its time)
            traceback.clear_frames(error.__traceback__)  # whose tensors the other may need the room of
            self.error = error
            self._end()


def take_turns(contenders: Sequence[Turns[Any]], count: int) -> None:
    """So many steps of each, unless it fails."""
    for one in contenders:
        one.begin()
    for _ in range(count):
        for one in contenders:
            one.take()
    for one in contenders:
        one.end()
