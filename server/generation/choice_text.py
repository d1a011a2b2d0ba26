"""One choice of an answer: the engine's tokens become pieces of text, up to a stop string or the end."""

from collections import deque
from collections.abc import Sequence

import msgspec

from model_runner.contract import TokenLogprobs
from scheduler.interface import FinishReason, RequestOutput
from server.generation.events import ChoiceEnd, Event, FinishedBy, OutputToken, TextDelta
from server.generation.planning.plan import OutputOptions
from server.text.detokenizer import make_detokenizer
from server.text.stop_strings import StopMatcher
from server.text.tokenizer import Tokenizer


class ChoiceText:
    """Follows one choice from its first token to its end."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], options: OutputOptions, index: int = 0) -> None:
        """`index` is the choice's number in the answer."""
        self._index = index
        self._options = options
        self._detokenizer = make_detokenizer(tokenizer, prompt, skip_special_tokens=options.skip_special_tokens)
        self._matcher = StopMatcher(options.stop, include_stop=options.include_stop) if options.stop else None
        self._reported = ReportedTokens() if options.reports_tokens else None
        self.num_tokens = 0
        """Tokens that belong to the answer, the one that completed a stop string included."""
        self.num_reasoning_tokens = 0
        self.has_ended = False

    def push(self, output: RequestOutput) -> Sequence[Event]:
        """What the engine's output adds, if it shows anything. Not to be called after the choice has ended."""
        shown = ""
        last = len(output.tokens) - 1
        for index, token in enumerate(output.tokens):
            ends_here = output.stop_token_id is not None and index == last
            text = "" if ends_here and not self._options.include_stop else self._detokenizer.push(token)
            self.num_tokens += 1
            if self._reported is not None:
                logprobs = output.logprobs[index] if output.logprobs else None
                method = method_of(output, index)
                self._reported.note(token, text, logprobs, method, is_complete=not self._detokenizer.pending)
            if self._matcher is None:
                shown += text
                continue
            search = self._matcher.push(text, armed=self.num_tokens > self._options.min_tokens)
            shown += search.text
            if search.stop is not None:
                return self._finish(shown, "stop", search.stop, output)
        if output.finish_reason is not None:
            return self._end(shown, output)
        return (TextDelta(self._index, shown, self._complete(shown)),) if shown else ()

    def _end(self, shown: str, output: RequestOutput) -> Sequence[Event]:
        """The engine ended the choice; the text that was held back may still hold a stop string."""
        rest = self._detokenizer.flush()
        if self._matcher is not None:
            search = self._matcher.push(rest, armed=self.num_tokens > self._options.min_tokens)
            if search.stop is not None:
                return self._finish(shown + search.text, "stop", search.stop, output)
            rest = search.text + self._matcher.flush()
        own_habit = output.stop_token_id in self._options.eos_token_ids
        reason: FinishedBy = "length" if output.finish_reason is FinishReason.LENGTH else "stop"
        return self._finish(shown + rest, reason, None if own_habit else output.stop_token_id, output)

    def _complete(self, shown: str) -> tuple[OutputToken, ...]:
        return () if self._reported is None else self._reported.complete(len(shown))

    def _finish(
        self, shown: str, reason: FinishedBy, stop_reason: str | int | None, output: RequestOutput
    ) -> Sequence[Event]:
        self.has_ended = True
        tokens = () if self._reported is None else self._reported.rest(len(shown))
        end = ChoiceEnd(self._index, reason, stop_reason, output.beam)
        return (TextDelta(self._index, shown, tokens, is_last=True), end) if shown or tokens else (end,)


def method_of(output: RequestOutput, index: int) -> str:
    """The method of speculation that guessed the token of this index; empty for those that the model's step found."""
    return output.draft_method if index < output.num_accepted else ""


class ReportedTokens:
    """The tokens of a choice that are told with their text: each waits for the piece that its text is complete with."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[OutputToken, int]] = deque()  # with how much text must be shown first
        self._num_chars = 0  # decoded
        self._num_shown = 0

    def note(
        self, token: int, text: str, logprobs: TokenLogprobs | None, draft_method: str, *, is_complete: bool
    ) -> None:
        """A token came, and with it this text, which may end before the token's last character."""
        entry = OutputToken(token, self._num_chars, logprobs, draft_method)
        self._num_chars += len(text)
        self._waiting.append((entry, self._num_chars if is_complete else self._num_chars + 1))

    def complete(self, num_chars: int) -> tuple[OutputToken, ...]:
        """The tokens that so much more text completes."""
        self._num_shown += num_chars
        tokens: list[OutputToken] = []
        while self._waiting and self._waiting[0][1] <= self._num_shown:
            tokens.append(self._waiting.popleft()[0])
        return tuple(tokens)

    def rest(self, num_chars: int) -> tuple[OutputToken, ...]:
        """All that wait, with the last of the text."""
        self._num_shown += num_chars
        last = self._num_shown
        rest = tuple(msgspec.structs.replace(entry, offset=min(entry.offset, last)) for entry, _ in self._waiting)
        self._waiting.clear()
        return rest
