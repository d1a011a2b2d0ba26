"""One choice of an answer: the engine's tokens become pieces of text, up to a stop string or the end."""

from collections import deque
from collections.abc import Sequence
from itertools import takewhile

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
        tokens: tuple[OutputToken, ...] = ()
        if shown and self._reported is not None:
            shown, tokens = self._reported.complete(shown)
        return (TextDelta(self._index, shown, tokens),) if shown else ()

    def _end(self, shown: str, output: RequestOutput) -> Sequence[Event]:
        """The engine ended the choice. A character that its last tokens began is left out: it would become another."""
        rest = "" if self._matcher is None else self._matcher.flush()
        own_habit = output.stop_token_id in self._options.eos_token_ids
        reason: FinishedBy = "length" if output.finish_reason is FinishReason.LENGTH else "stop"
        return self._finish(shown + rest, reason, None if own_habit else output.stop_token_id, output)

    def _finish(
        self, shown: str, reason: FinishedBy, stop_reason: str | int | None, output: RequestOutput
    ) -> Sequence[Event]:
        self.has_ended = True
        tokens: tuple[OutputToken, ...] = ()
        if self._reported is not None:
            shown, tokens = self._reported.rest(shown)
        end = ChoiceEnd(self._index, reason, stop_reason, output.beam)
        return (TextDelta(self._index, shown, tokens, is_last=True), end) if shown or tokens else (end,)


def method_of(output: RequestOutput, index: int) -> str:
    """The method of speculation that guessed the token of this index; empty for those that the model's step found."""
    return output.draft_method if index < output.num_accepted else ""


class ReportedTokens:
    """The tokens of a choice, to be reported with its text: a piece of text ends where a token does, and has one."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[OutputToken, int]] = deque()  # with how much text must be shown first
        self._num_chars = 0  # decoded
        self._num_shown = 0
        self._held = ""  # text that ends inside of a token

    def note(
        self, token: int, text: str, logprobs: TokenLogprobs | None, draft_method: str, *, is_complete: bool
    ) -> None:
        """A token came, and with it this text, which may end before the token's last character."""
        entry = OutputToken(token, self._num_chars, logprobs, draft_method)
        self._num_chars += len(text)
        self._waiting.append((entry, self._num_chars if is_complete else self._num_chars + 1))

    def complete(self, text: str) -> tuple[str, tuple[OutputToken, ...]]:
        """What can be shown when this text has become certain: up to the end of a token, with the tokens in it."""
        held = self._held + text
        known = self._num_shown + len(held)
        whole = [end for _, end in takewhile(lambda waiting: waiting[1] <= known, self._waiting)]
        num_chars = max(whole, default=0) - self._num_shown
        if num_chars <= 0:
            self._held = held
            return "", ()
        self._num_shown += num_chars
        self._held = held[num_chars:]
        return held[:num_chars], tuple(self._waiting.popleft()[0] for _ in whole)

    def rest(self, text: str) -> tuple[str, tuple[OutputToken, ...]]:
        """The last of the text, with all tokens that wait."""
        rest = self._held + text
        last = self._num_shown + len(rest)
        tokens = tuple(msgspec.structs.replace(entry, offset=min(entry.offset, last)) for entry, _ in self._waiting)
        self._waiting.clear()
        return rest, tokens
