"""A bound on how long a model thinks before it answers."""

from collections.abc import Iterable
from copy import copy
from typing import Final, Protocol, Self

from model_runner.contract import Thinking

_WHITESPACE: Final = b" \t\r\n"
"""May stand before the tag that begins the reasoning."""


class Spelling(Protocol):
    """What tokens stand for."""

    def spelled(self, token: int) -> bytes:
        """Its bytes; after 0xFF if it is a control token."""
        ...

    def first_of(self, text: bytes) -> int:
        """The first token of a text in this spelling."""
        ...


class ThinkingBudget:
    """Follows the reasoning of one output, and forces its end when it has taken its tokens.

    It looks at the output's bytes, as tags may share their tokens with the text beside them.
    """

    def __init__(self, thinking: Thinking, spelling: Spelling, output: Iterable[int] = ()) -> None:
        self._thinking = thinking
        self._spelling = spelling
        self._is_open = thinking.is_begun
        self._is_over = False
        self._num_tokens = 0
        """Of the reasoning so far."""
        self._tail = b""
        """Last bytes, as far as a tag may have begun in them."""
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """A token was generated."""
        if self._is_over:
            return
        self._tail += self._spelling.spelled(token)
        if self._is_open:
            self._num_tokens += 1
        else:
            self._look_for_begin()
        if self._is_open:
            end = self._thinking.end
            self._is_over = end in self._tail
            self._tail = self._tail[-len(end) :]

    def fork(self, *, from_start: bool) -> Self:
        """One that follows another output, which begins as this one did so far, or from its start."""
        return type(self)(self._thinking, self._spelling) if from_start else copy(self)

    def _look_for_begin(self) -> None:
        """It is the first that an output has but whitespace, or there is no reasoning."""
        begin, text = self._thinking.begin, self._tail.lstrip(_WHITESPACE)
        self._is_open = text.startswith(begin)
        self._is_over = not self._is_open and not begin.startswith(text)
        self._tail = text.removeprefix(begin)

    @property
    def forced(self) -> int | None:
        """The token that must come next; None if any may."""
        if self._is_over or not self._is_open or self._num_tokens < self._thinking.max_tokens:
            return None
        end = self._thinking.end
        begun = next(length for length in range(len(end) - 1, -1, -1) if self._tail.endswith(end[:length]))
        return self._spelling.first_of(end[begun:])
