"""The text of beams as the engine sees it: a stop string ends a sequence there, so that others can take its place."""

from collections.abc import Callable
from copy import copy

from scheduler.interface import EngineRequest
from server.text.detokenizer import Detokenizer, make_detokenizer
from server.text.stop_strings import StopMatcher
from server.text.tokenizer import Tokenizer


class StopWatch:
    """Looks for stop strings in a beam's text, as it will be looked for them when the text is shown."""

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, min_tokens: int) -> None:
        """Strings that are complete with one of the first `min_tokens` do not count."""
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._left = min_tokens

    def fork(self) -> "StopWatch":
        """See TextWatch."""
        return StopWatch(self._detokenizer.fork(), copy(self._matcher), self._left)

    def push(self, token: int) -> bool:
        """See TextWatch."""
        is_armed = self._left == 0
        self._left = max(0, self._left - 1)
        return self._matcher.push(self._detokenizer.push(token), armed=is_armed).stop is not None


class StopWatches:
    """Makes them; the tokenizer is loaded for the first one."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Tokenizer | None = None

    def __call__(self, request: EngineRequest) -> StopWatch:
        """See WatchText. The request has a beam search."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        search = request.beam_search
        assert search is not None
        detokenizer = make_detokenizer(self._tokenizer, request.prompt, skip_special_tokens=search.skip_special_tokens)
        return StopWatch(detokenizer, StopMatcher(search.stop), request.sampling.min_tokens)
