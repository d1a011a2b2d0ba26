"""Choices of an answer: the engine's tokens become text, reasoning and tool calls, up to the stop."""

import json
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count, takewhile

import msgspec

from model_runner.contract import TokenLogprobs
from scheduler.interface import FinishReason, RequestOutput
from server.generation.events import (
    ChoiceEnd,
    Delta,
    Event,
    FinishedBy,
    OutputToken,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from server.generation.output_formats import ParserConfig
from server.generation.parsing.choose import REASONING_TAGS, TOOL_FORMATS
from server.generation.parsing.output_parser import OutputParser
from server.generation.parsing.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning
from server.generation.planning.plan import OutputOptions
from server.generation.tools import CUSTOM_INPUT
from server.text.detokenizer import make_detokenizer
from server.text.stop_strings import StopMatcher
from server.text.tokenizer import Tokenizer


class _Choice:
    """One choice, from its first token to its end."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], options: OutputOptions, index: int) -> None:
        """`index` is the choice's number in the answer."""
        self._index = index
        self._options = options
        self._detokenizer = make_detokenizer(tokenizer, prompt, skip_special_tokens=options.skip_special_tokens)
        self.num_tokens = 0
        """Tokens of the answer, including the one that completed a stop string."""
        self.num_reasoning_tokens = 0
        self.has_ended = False

    def push(self, output: RequestOutput) -> Sequence[Event]:
        """The events of an engine output. Must not be called after the choice has ended."""
        raise NotImplementedError

    @property
    def _may_stop(self) -> bool:
        """Whether stop strings count already."""
        return self.num_tokens > self._options.min_tokens

    def _is_hidden(self, output: RequestOutput, place: int) -> bool:
        """Whether the token at this place is a stop token whose text is not returned."""
        is_stop = output.stop_token_id is not None and place == len(output.tokens) - 1
        return is_stop and not self._options.include_stop

    def _stop_token(self, output: RequestOutput) -> int | None:
        """The one of the request's `stop_token_ids` that ended the choice; None for the model's own EOS tokens."""
        return None if output.stop_token_id in self._options.eos_token_ids else output.stop_token_id


class ChoiceText(_Choice):
    """A choice of plain text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], options: OutputOptions, index: int = 0) -> None:
        super().__init__(tokenizer, prompt, options, index)
        self._matcher = StopMatcher(options.stop, include_stop=options.include_stop) if options.stop else None
        self._reported = ReportedTokens() if options.reports_tokens else None

    def push(self, output: RequestOutput) -> Sequence[Event]:
        shown = ""
        for index, token in enumerate(output.tokens):
            text = "" if self._is_hidden(output, index) else self._detokenizer.push(token)
            self.num_tokens += 1
            if self._reported is not None:
                logprobs = output.logprobs[index] if output.logprobs else None
                method = method_of(output, index)
                self._reported.note(token, text, logprobs, method, is_complete=not self._detokenizer.pending)
            if self._matcher is None:
                shown += text
                continue
            search = self._matcher.push(text, armed=self._may_stop)
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
        """End the choice as the engine did. A cut last character is dropped, because it would show as another one."""
        rest = "" if self._matcher is None else self._matcher.flush()
        reason: FinishedBy = "length" if output.finish_reason is FinishReason.LENGTH else "stop"
        return self._finish(shown + rest, reason, self._stop_token(output), output)

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
    """The speculation method that drafted the token of this index; empty if the model's own step found it."""
    return output.draft_method if index < output.num_accepted else ""


class ReportedTokens:
    """The tokens to report with a choice's text. Text is cut at token ends, so that each piece has whole tokens."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[OutputToken, int]] = deque()  # with how many characters must be shown first
        self._num_chars = 0  # characters decoded so far
        self._num_shown = 0
        self._held = ""  # text that ends inside a token

    def note(
        self, token: int, text: str, logprobs: TokenLogprobs | None, draft_method: str, *, is_complete: bool
    ) -> None:
        """Add a token and the text that it made certain, which may end before the token's last character."""
        entry = OutputToken(token, self._num_chars, logprobs, draft_method)
        self._num_chars += len(text)
        self._waiting.append((entry, self._num_chars if is_complete else self._num_chars + 1))

    def complete(self, text: str) -> tuple[str, tuple[OutputToken, ...]]:
        """The part of the certain text up to the last whole token, and the tokens in it."""
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
        """The last of the text, with all tokens not yet reported."""
        rest = self._held + text
        last = self._num_shown + len(rest)
        tokens = tuple(msgspec.structs.replace(entry, offset=min(entry.offset, last)) for entry, _ in self._waiting)
        self._waiting.clear()
        return rest, tokens


class ChoiceParts(_Choice):
    """A choice that may have reasoning and tool calls. Stop strings apply only to the answer's text."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], options: OutputOptions, parser: ParserConfig, index: int = 0
    ) -> None:
        super().__init__(tokenizer, prompt, options, index)
        self._controls = parser.controls
        self._only_calls = parser.only_calls
        self._parser = OutputParser(
            None if parser.tool_format is None else TOOL_FORMATS[parser.tool_format],
            None if parser.reasoning is None else REASONING_TAGS[parser.reasoning],
            parser.expected,
            frozenset(parser.controls.values()),
        )
        self._matcher = StopMatcher(options.stop, include_stop=options.include_stop)
        self._calls = _Calls(index, parser.custom_tools)
        self._tokens: list[OutputToken] = []
        """Tokens for the next event."""

    def push(self, output: RequestOutput) -> Sequence[Event]:
        deltas: list[Delta] = []
        for place, token in enumerate(output.tokens):
            self.num_tokens += 1
            found: list[Delta] = []
            stop = self._take(() if self._is_hidden(output, place) else self._parse(token), found)
            if self._options.reports_tokens:
                logprobs = output.logprobs[place] if output.logprobs else None
                self._tokens.append(OutputToken(token, 0, logprobs, method_of(output, place)))
            self._join(found, deltas)
            if stop is not None:
                return self._finish(deltas, "stop", stop, output)
        return deltas if output.finish_reason is None else self._end(deltas, output)

    def _parse(self, token: int) -> Sequence[Part]:
        if token in self._controls:
            before = self._parser.push(self._detokenizer.flush())
            return (*before, *self._parser.push(self._controls[token], is_control=True))
        return self._parser.push(self._detokenizer.push(token))

    def _end(self, deltas: list[Delta], output: RequestOutput) -> Sequence[Event]:
        """End the choice as the engine did, and show what was held back, except a cut last character."""
        is_cut = output.finish_reason is FinishReason.LENGTH
        found: list[Delta] = []
        stop = self._take(self._parser.finish(is_cut=is_cut), found)
        if stop is None:
            self._show(self._matcher.flush(), found)
        self._join(found, deltas)
        if stop is not None:
            return self._finish(deltas, "stop", stop, output)
        reason: FinishedBy = "length" if is_cut else "tool_calls" if self._calls.num_whole else "stop"
        return self._finish(deltas, reason, self._stop_token(output), output)

    def _take(self, parts: Sequence[Part], deltas: list[Delta]) -> str | None:
        """Add the events of these parts to `deltas`. Returns the stop string that ended the choice, if any."""
        for part in parts:
            if isinstance(part, Content) and self._only_calls:
                continue
            if isinstance(part, Content):
                search = self._matcher.push(part.text, armed=self._may_stop)
                self._show(search.text, deltas)
                if search.stop is not None:
                    return search.stop
                continue
            self._show(self._matcher.flush(), deltas)
            if isinstance(part, Reasoning):
                self.num_reasoning_tokens = self.num_tokens
                _add(deltas, ReasoningDelta(self._index, part.text))
            else:
                for delta in self._calls.take(part):
                    _add(deltas, delta)
        return None

    def _show(self, text: str, deltas: list[Delta]) -> None:
        if text:
            _add(deltas, TextDelta(self._index, text))

    def _join(self, found: list[Delta], deltas: list[Delta]) -> None:
        """Append `found` to `deltas`. Waiting tokens go to its first text, otherwise to its last event."""
        if found and self._tokens:
            texts = (place for place, delta in enumerate(found) if isinstance(delta, TextDelta))
            place = next(texts, len(found) - 1)
            found[place] = self._with_tokens(found[place])
        for delta in found:
            _add(deltas, delta)

    def _with_tokens(self, delta: Delta) -> Delta:
        tokens, self._tokens = tuple(self._tokens), []
        return msgspec.structs.replace(delta, tokens=(*delta.tokens, *tokens))

    def _finish(
        self, deltas: list[Delta], reason: FinishedBy, stop_reason: str | int | None, output: RequestOutput
    ) -> Sequence[Event]:
        self.has_ended = True
        if self._tokens:
            *before, last = deltas or [TextDelta(self._index, "")]
            deltas = [*before, self._with_tokens(last)]
        return (*deltas, ChoiceEnd(self._index, reason, stop_reason, output.beam))


class _Calls:
    """The tool calls of a choice: their indices, their ids, and the text of custom calls."""

    def __init__(self, choice: int, custom_tools: frozenset[str]) -> None:
        self._choice = choice
        self._custom_tools = custom_tools
        self._numbers = count()
        self._number = 0
        self._custom: list[str] | None = None
        """Arguments so far of a call of a custom tool."""
        self.num_whole = 0

    def take(self, part: CallBegin | CallArguments | CallEnd) -> Iterator[Delta]:
        """The events of a part."""
        match part:
            case CallBegin():
                self._number = next(self._numbers)
                is_custom = part.name in self._custom_tools
                self._custom = [] if is_custom else None
                yield ToolCallBegin(self._choice, self._number, part.id or new_call_id(), part.name, is_custom)
            case CallArguments() if self._custom is not None:
                self._custom.append(part.text)
            case CallArguments():
                yield ToolCallDelta(self._choice, self._number, part.text)
            case CallEnd():
                self.num_whole += 1
                if self._custom is not None:
                    text = _custom_text("".join(self._custom))
                    yield ToolCallDelta(self._choice, self._number, text, is_custom=True)


def new_call_id() -> str:
    """A unique id of nine letters and digits; some models' templates accept no other form."""
    return uuid.uuid4().hex[:9]


def _custom_text(arguments: str) -> str:
    """The one argument of a custom tool, or all arguments if the model gave others."""
    value = json.loads(arguments or "{}", parse_int=float)  # Python refuses integers with thousands of digits
    text = value.get(CUSTOM_INPUT)
    return text if isinstance(text, str) and len(value) == 1 else arguments


def _add(deltas: list[Delta], delta: Delta) -> None:
    """Append an event, or extend the last one if both are pieces of the same text."""
    match deltas[-1:], delta:
        case [TextDelta() as last], TextDelta():
            deltas[-1] = _prolonged(last, delta)
        case [ReasoningDelta() as last], ReasoningDelta():
            deltas[-1] = _prolonged(last, delta)
        case [ToolCallDelta() as last], ToolCallDelta() if last.call == delta.call:
            deltas[-1] = _prolonged(last, delta)
        case _:
            deltas.append(delta)


def _prolonged(
    last: TextDelta | ReasoningDelta | ToolCallDelta, more: TextDelta | ReasoningDelta | ToolCallDelta
) -> Delta:
    return msgspec.structs.replace(last, text=last.text + more.text, tokens=(*last.tokens, *more.tokens))
