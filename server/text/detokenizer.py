"""Tokens to text as they come: whole characters only, and the search for stop strings."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from server.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_LONGEST_UNFINISHED = 3
"""A character cut short shows as at most this many replacement characters: one for each byte, in some decoders."""
_CONTEXT = 8
"""Tokens of the prompt that decoders get to see, to decide on the space before the first word."""


class Detokenizer:
    """The text of one growing sequence of tokens.

    Only a window of the last tokens is decoded again for each new one; the window begins where the text was last
    certain. What is returned over time, `flush` included, adds up to the text of the whole.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        """`context` are the tokens before the first; their text is not returned."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._known = ""  # the text of the window as far as it was decoded
        self._returned = 0  # how much of it was returned, or stands before the first token
        self._start_window(list(context[-_CONTEXT:]))
        if len(context) > _CONTEXT:
            self._skip_cut_character()
        self._returned = len(_certain(self._known))  # a character that the prompt began is completed by the output

    def fork(self) -> "Detokenizer":
        """One that goes its own way from here."""
        other = copy(self)
        other._window = self._window.copy()
        return other

    @property
    def pending(self) -> bool:
        """Whether the last token ended inside a character that later tokens may complete."""
        return self._pending

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if self._skip_special and token in self._tokenizer.special_ids:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.startswith(self._known[: self._returned]):  # the new token changed what stands before it
            self._start_window([])
            self._window.append(token)
            text = self._decode(self._window)
        new = _certain(text)[self._returned :]
        self._pending = text.endswith(_UNFINISHED)
        if self._pending:
            self._known = text
            self._returned += len(new)
        else:
            self._slide()
        return new

    def flush(self) -> str:
        """What was held back, when no more tokens come: an unfinished character becomes U+FFFD."""
        rest = self._known[self._returned :] if self._pending else ""
        if self._pending:
            self._slide()
        return rest

    def _skip_cut_character(self) -> None:
        """The context may begin inside a character; it would count as one that is not finished."""
        for _ in range(_LONGEST_UNFINISHED):
            if self._known.startswith(_UNFINISHED):
                self._start_window(self._window[1:])

    def _slide(self) -> None:
        """Keep as context only the tokens that came since the last time."""
        self._start_window(self._window[self._context_length :])

    def _start_window(self, context: list[int]) -> None:
        self._window = context
        self._context_length = len(context)
        self._known = self._decode(context)
        self._returned = len(self._known)
        self._pending = False

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special) if tokens else ""


def _certain(text: str) -> str:
    """The text without what later bytes could still turn into a character."""
    kept = text.rstrip(_UNFINISHED)
    return kept + _UNFINISHED * max(0, len(text) - len(kept) - _LONGEST_UNFINISHED)


@dataclass(frozen=True, slots=True)
class StopSearch:
    """What may be shown after a piece of text, and the stop string that ended it, if any."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Looks for the first stop string in a growing text; never shows what could be the beginning of one.

    The first is the one that is complete first; of several that end together, the longest. So the result does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> StopSearch:
        """`armed` is False while stop strings do not count yet; those that end in this piece are then passed over."""
        buffer = self._held + text
        found = self._first_match(buffer, len(self._held)) if armed and self._stops else None
        if found is not None:
            start, stop = found
            self._held = ""
            return StopSearch(buffer[: start + len(stop) if self._include_stop else start], stop)
        shown = len(buffer) - self._longest_beginning(buffer)
        self._held = buffer[shown:]
        return StopSearch(buffer[:shown])

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _first_match(self, buffer: str, num_old: int) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first, among those that end in the new part of the buffer."""
        matches = []
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), -len(stop), start, stop))
        return min(matches)[2:] if matches else None

    def _longest_beginning(self, buffer: str) -> int:
        """How many characters at the end of the buffer could begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(buffer)), 0, -1):
            tail = buffer[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
