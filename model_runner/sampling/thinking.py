"""Limits the length of reasoning before the answer."""

from collections.abc import Iterable
from copy import copy
from typing import TYPE_CHECKING, Final, Self

from model_runner.contract import Thinking

if TYPE_CHECKING:
    from model_runner.sampling.grammar import TokenBytes

_WHITESPACE: Final = b" \t\r\n"
"""May precede the tag that begins the reasoning."""


class ThinkingBudget:
    """Tracks the reasoning of one output, and forces its end when the token limit is reached.

    It works on bytes, because a tag may share tokens with the text around it.
    """

    def __init__(self, thinking: Thinking, vocabulary: "TokenBytes", output: Iterable[int] = ()) -> None:
        self._thinking = thinking
        self._vocabulary = vocabulary
        self._is_open = thinking.is_begun
        self._is_over = False
        self._num_tokens = 0
        """Number of reasoning tokens so far."""
        self._tail = b""
        """The last bytes of the output, as far as they may be part of a tag."""
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """Record a generated token."""
        if self._is_over:
            return
        self._tail += self._vocabulary.spelled(token)
        if self._is_open:
            self._num_tokens += 1
        else:
            self._look_for_begin()
        if self._is_open:
            end = self._thinking.end
            self._is_over = end in self._tail
            self._tail = self._tail[-len(end) :]

    def fork(self, *, from_start: bool) -> Self:
        """A copy for another output: with the same beginning up to here, or from the start."""
        return type(self)(self._thinking, self._vocabulary) if from_start else copy(self)

    def _look_for_begin(self) -> None:
        """Decide whether the output opens with the begin tag, after whitespace. Otherwise there is no reasoning."""
        begin, text = self._thinking.begin, self._tail.lstrip(_WHITESPACE)
        self._is_open = text.startswith(begin)
        self._is_over = not self._is_open and not begin.startswith(text)
        self._tail = text.removeprefix(begin)

    @property
    def forced(self) -> int | None:
        """The only token that may come next, or None if any may."""
        if self._is_over or not self._is_open or self._num_tokens < self._thinking.max_tokens:
            return None
        end = self._thinking.end
        begun = next(length for length in range(len(end) - 1, -1, -1) if self._tail.endswith(end[:length]))
        return self._vocabulary.first_of(end[begun:])
