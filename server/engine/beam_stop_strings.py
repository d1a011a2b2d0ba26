"""Stop strings in beam search: the engine decodes each beam's text, so that a finished beam makes room for another.

Tokenizer and detokenizer are imported when the first such request needs them.
"""

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

from scheduler.interface import EngineRequest, TextWatch
from server.text.stop_strings import StopMatcher

if TYPE_CHECKING:
    from server.text.detokenizer import Detokenizer
    from server.text.tokenizer import Tokenizer


class StopStringWatch(TextWatch):
    """Looks for stop strings in one beam's text, by the same rules as in the text that is returned."""

    def __init__(self, detokenizer: "Detokenizer", matcher: StopMatcher, min_tokens: int) -> None:
        """Stop strings completed by one of the first `min_tokens` tokens do not count."""
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._left = min_tokens

    def fork(self) -> "StopStringWatch":
        return StopStringWatch(self._detokenizer.fork(), copy(self._matcher), self._left)

    def push(self, token: int) -> bool:
        """Whether a stop string is complete with this token."""
        is_armed = self._left == 0
        self._left = max(0, self._left - 1)
        return self._matcher.push(self._detokenizer.push(token), armed=is_armed).stop is not None


class StopStringWatches:
    """Makes a watch for each beam search. The tokenizer is loaded for the first one."""

    def __init__(self, load_tokenizer: "Callable[[], Tokenizer]") -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Tokenizer | None = None

    def __call__(self, request: EngineRequest) -> StopStringWatch:
        """A watch for the request, which must have a beam search."""
        from server.text.detokenizer import make_detokenizer  # noqa: PLC0415

        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        search = request.beam_search
        assert search is not None
        detokenizer = make_detokenizer(self._tokenizer, request.prompt, skip_special_tokens=search.skip_special_tokens)
        return StopStringWatch(detokenizer, StopMatcher(search.stop), request.sampling.min_tokens)
