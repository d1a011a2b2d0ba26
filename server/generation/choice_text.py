"""One choice of an answer: the engine's tokens become pieces of text, up to a stop string or the end."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from model_runner.contract import TokenLogprobs
from scheduler.interface import BeamScore, FinishReason, RequestOutput
from server.generation.planning.planner import OutputOptions
from server.text.detokenizer import Detokenizer, StopMatcher
from server.text.tokenizer import Tokenizer

FinishedBy = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A token of the answer."""

    id: int
    offset: int
    """Characters of the text before it."""
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of a choice's text, the tokens that are complete with it, and perhaps its end.

    The pieces of a choice together hold all of its text, and each of its tokens once.
    """

    text: str
    tokens: tuple[OutputToken, ...] = ()
    finish_reason: FinishedBy | None = None
    stop_reason: str | int | None = None
    """The stop string, or the token among the request's `stop_token_ids`, that ended the choice."""
    beam: BeamScore | None = None
    """With the end of what beam search found."""


class ChoiceText:
    """Follows one choice from its first token to its end."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], options: OutputOptions) -> None:
        self._options = options
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=options.skip_special_tokens)
        self._matcher = StopMatcher(options.stop, include_stop=options.include_stop)
        self._waiting: deque[tuple[OutputToken, int]] = deque()  # with how much text must be shown first
        self._num_chars = 0  # decoded
        self._num_shown = 0
        self.num_tokens = 0
        """Tokens that belong to the answer, the one that completed a stop string included."""
        self.finish_reason: FinishedBy | None = None

    def push(self, output: RequestOutput) -> Piece:
        """What the engine's output adds; its piece may be empty. Not to be called after the choice has finished."""
        shown = ""
        for index, token in enumerate(output.tokens):
            ends_here = output.stop_token_id is not None and index == len(output.tokens) - 1
            text = "" if ends_here and not self._options.include_stop else self._detokenizer.push(token)
            self._note(token, text, output.logprobs[index] if output.logprobs else None)
            search = self._matcher.push(text, armed=self.num_tokens > self._options.min_tokens)
            shown += search.text
            if search.stop is not None:
                return self._finish(shown, "stop", search.stop)
        if output.finish_reason is None:
            return self._piece(shown)
        return self._end(shown, output)

    def _note(self, token: int, text: str, logprobs: TokenLogprobs | None) -> None:
        self.num_tokens += 1
        entry = OutputToken(token, self._num_chars, logprobs)
        self._num_chars += len(text)
        needed = self._num_chars + 1 if self._detokenizer.pending else self._num_chars
        self._waiting.append((entry, needed))

    def _end(self, shown: str, output: RequestOutput) -> Piece:
        """The engine ended the choice; the text that was held back may still hold a stop string."""
        search = self._matcher.push(self._detokenizer.flush(), armed=self.num_tokens > self._options.min_tokens)
        if search.stop is not None:
            return self._finish(shown + search.text, "stop", search.stop)
        shown += search.text + self._matcher.flush()
        own_habit = output.stop_token_id in self._options.eos_token_ids
        reason: FinishedBy = "length" if output.finish_reason is FinishReason.LENGTH else "stop"
        return self._finish(shown, reason, None if own_habit else output.stop_token_id)

    def _piece(self, shown: str) -> Piece:
        """Text with the tokens that it completes; without text they wait for the next piece."""
        self._num_shown += len(shown)
        tokens: list[OutputToken] = []
        while shown and self._waiting and self._waiting[0][1] <= self._num_shown:
            tokens.append(self._waiting.popleft()[0])
        return Piece(shown, tuple(tokens))

    def _finish(self, shown: str, reason: FinishedBy, stop_reason: str | int | None) -> Piece:
        self.finish_reason = reason
        self._num_shown += len(shown)
        rest = tuple(replace(entry, offset=min(entry.offset, self._num_shown)) for entry, _ in self._waiting)
        self._waiting.clear()
        return Piece(shown, rest, reason, stop_reason)
