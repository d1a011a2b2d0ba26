"""A bound on how long a model thinks before it answers."""

from collections.abc import Iterable, Sequence

from model_runner.contract import Thinking

_MOST_BEFORE = 1
"""Tokens, of whitespace, before the tag that begins the reasoning: what comes later is the answer."""


class ThinkingBudget:
    """Follows the reasoning of one output, and forces its end when it has taken its tokens."""

    def __init__(self, thinking: Thinking, output: Iterable[int] = ()) -> None:
        self._thinking = thinking
        self._is_open = thinking.is_begun
        self._is_over = False
        self._num_before = 0
        """Tokens that came while there was no reasoning."""
        self._num_tokens = 0
        """Of the reasoning so far."""
        self._tail: tuple[int, ...] = ()
        """The last tokens, as many as a tag may have."""
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """A token was generated."""
        if self._is_over:
            return
        longest = max(len(self._thinking.begin), len(self._thinking.end))
        self._tail = (*self._tail, token)[-longest:]
        if self._is_open:
            self._num_tokens += 1
            self._is_over = _ends_with(self._tail, self._thinking.end)
        else:
            self._num_before += 1
            self._is_open = _ends_with(self._tail, self._thinking.begin)
            self._is_over = not self._is_open and self._num_before >= len(self._thinking.begin) + _MOST_BEFORE

    @property
    def forced(self) -> int | None:
        """The token that must come next; None if any may."""
        if self._is_over or not self._is_open or self._num_tokens < self._thinking.max_tokens:
            return None
        end = self._thinking.end
        begun = next(length for length in range(len(end) - 1, -1, -1) if _ends_with(self._tail, end[:length]))
        return end[begun]


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return len(end) <= len(tokens) and tuple(tokens[len(tokens) - len(end) :]) == tuple(end)
