"""Tokens to text as they come, in whole characters only."""

import codecs
from collections.abc import Sequence
from copy import copy
from typing import Protocol, Self

from server.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_LONGEST_UNFINISHED = 3
"""A character cut short shows as at most this many replacement characters: one for each byte, in some decoders."""
_CONTEXT = 8
"""Tokens of the prompt that decoders get to see, to decide on the space before the first word."""
_LONGEST_WINDOW = 16
"""Tokens without a whole character among the last ones after which the first of them are no longer looked at."""


class Detokenizer(Protocol):
    """The text of one growing sequence of tokens. What is returned over time, `flush` included, adds up to it."""

    pending: bool
    """Whether the last token ended inside a character that later tokens may complete."""

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        ...

    def flush(self) -> str:
        """What was held back, when no more tokens come: an unfinished character becomes U+FFFD."""
        ...

    def fork(self) -> Self:
        """One that goes its own way from here."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True
) -> Detokenizer:
    """`context` are the tokens before the first; their text is not returned, but a character that they began is."""
    kind = ByteDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, context, skip_special_tokens=skip_special_tokens)


class ByteDetokenizer:
    """For tokens that stand for bytes, whatever is beside them: each is looked at once."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._whole_text = tokenizer.whole_text
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.pending = False
        for token in context[-_CONTEXT:]:
            self.push(token)

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        if not self.pending and (text := self._whole_text(token)) is not None:
            return text
        text = self._decoder.decode(self._token_bytes(token))
        self.pending = self._decoder.getstate()[0] != b""
        return text

    def flush(self) -> str:
        self.pending = False
        return self._decoder.decode(b"", final=True)

    def fork(self) -> "ByteDetokenizer":
        other = copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other


class WindowDetokenizer:
    """For decoders that look at neighbours: a window of the last tokens is decoded again for each new one.

    The window begins where the text was last certain. It is bounded where no character becomes whole for long, so that
    the time for a token is; a byte run that is no text may then be read from its middle.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window: list[int] = []
        self._context_length = 0
        self._known = ""  # the text of the window as far as it was decoded
        self._returned = 0  # how much of it was returned, or stands before the first token
        self._start_window(list(context[-_CONTEXT:]))
        if len(context) > _CONTEXT:
            self._skip_cut_character()
        self._returned = len(_certain(self._known))  # a character that the prompt began is completed by the output

    def fork(self) -> "WindowDetokenizer":
        other = copy(self)
        other._window = self._window.copy()
        return other

    def push(self, token: int) -> str:
        if self._skip_special and token in self._tokenizer.special_ids:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.startswith(self._known[: self._returned]):  # the new token changed what stands before it
            self._start_window([])
            self._window.append(token)
            text = self._decode(self._window)
        new = _certain(text)[self._returned :]
        self.pending = text.endswith(_UNFINISHED)
        if self.pending:
            self._known = text
            self._returned += len(new)
            self._bound_window()
        else:
            self._slide()
        return new

    def flush(self) -> str:
        rest = self._known[self._returned :] if self.pending else ""
        if self.pending:
            self._slide()
        return rest

    def _bound_window(self) -> None:
        """Look at the last tokens alone that stand for anything, if they show what is held back."""
        if len(self._window) - self._context_length <= _LONGEST_WINDOW:
            return
        spelled = [token for token in self._window if self._tokenizer.token_bytes(token)]
        window = spelled[-_LONGEST_UNFINISHED - 1 :]
        held, known = self._known[self._returned :], self._decode(window)
        if known.endswith(held):
            self._window, self._context_length = window, 0
            self._known, self._returned = known, len(known) - len(held)

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
        self.pending = False

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special) if tokens else ""


def _certain(text: str) -> str:
    """The text without what later bytes could still turn into a character."""
    kept = text.rstrip(_UNFINISHED)
    return kept + _UNFINISHED * max(0, len(text) - len(kept) - _LONGEST_UNFINISHED)
