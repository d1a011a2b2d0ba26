"""Incremental detokenization: tokens to text, in whole characters only."""

import codecs
from collections.abc import Sequence
from copy import copy
from typing import Protocol, Self

from server.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_LONGEST_UNFINISHED = 3
"""Replacement characters at most for a cut character: some decoders emit one for each byte."""
_CONTEXT = 8
"""Prompt tokens shown to the decoder, which decides from them on the space before the first word."""
_LONGEST_WINDOW = 16
"""Tokens without a whole character after which the window is cut to the last few."""


class Detokenizer(Protocol):
    """The text of one growing sequence of tokens: all returned pieces, with `flush`, concatenated."""

    pending: bool
    """Whether the last token ended inside a character that later tokens may complete."""

    def push(self, token: int) -> str:
        """The text that this token makes certain."""
        ...

    def flush(self) -> str:
        """The text held back, when no more tokens follow: an unfinished character becomes U+FFFD."""
        ...

    def fork(self) -> Self:
        """An independent copy in the same state."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True
) -> Detokenizer:
    """A detokenizer for tokens after `context`, whose text is returned only where it cut a character."""
    kind = ByteDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, context, skip_special_tokens=skip_special_tokens)


class ByteDetokenizer:
    """For tokens that stand for bytes, independent of their neighbours: decodes each token once."""

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
    """For decoders that depend on neighbours: decodes a window of the last tokens again for each new one.

    The window starts where the text was last certain. It is bounded, to bound the time per token, even when no
    character completes for long. A byte run that is not valid text may then be read from its middle.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window: list[int] = []
        self._context_length = 0
        self._known = ""  # the decoded text of the window
        self._returned = 0  # its part that was returned, or precedes the first token
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
        if not text.startswith(self._known[: self._returned]):  # the new token changed the text before it
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
        """Cut the window to its last tokens with bytes, if they show the text that is held back."""
        if len(self._window) - self._context_length <= _LONGEST_WINDOW:
            return
        spelled = [token for token in self._window if self._tokenizer.token_bytes(token)]
        window = spelled[-_LONGEST_UNFINISHED - 1 :]
        held, known = self._known[self._returned :], self._decode(window)
        if known.endswith(held):
            self._window, self._context_length = window, 0
            self._known, self._returned = known, len(known) - len(held)

    def _skip_cut_character(self) -> None:
        """Drop a partial character at the start of the context, which would count as unfinished."""
        for _ in range(_LONGEST_UNFINISHED):
            if self._known.startswith(_UNFINISHED):
                self._start_window(self._window[1:])

    def _slide(self) -> None:
        """Keep as context only the tokens added since the last time."""
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
    """The text without a tail that later bytes could complete to a character."""
    kept = text.rstrip(_UNFINISHED)
    return kept + _UNFINISHED * max(0, len(text) - len(kept) - _LONGEST_UNFINISHED)
