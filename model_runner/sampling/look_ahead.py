"""What a grammar leaves no choice about."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import llguidance
import llguidance.numpy
import numpy as np

from model_runner.sampling.vocabulary import Vocabulary

_BYTES_PER_TOKEN: Final = 4
"""How far to look ahead for each token that is wanted."""
_LETTERS: Final = b"ae"


@dataclass(frozen=True, slots=True)
class Guess:
    """What probably comes next."""

    tokens: Sequence[int] = ()
    is_forced: Sequence[bool] = ()
    """For each token, whether the grammar leaves no other text than its own, after those before."""


class LookAhead:
    """Goes on by itself, on a copy of a matcher, for as long as there is only one way to do so."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._mask = np.zeros((1, vocabulary.num_words), dtype=np.int32)
        self._text = b""
        self._guessed: set[int] = set()
        """Places of the text where there was a choice."""

    def guess(self, before: bytes, most: int) -> Guess:
        """At most so many tokens, after this text."""
        is_spaced = _is_spaced(before)
        while len(self._text) < most * _BYTES_PER_TOKEN and not self._matcher.is_stopped():
            after_mark = is_spaced and (self._text or before)[-1:] in (b":", b",")
            step = self._matcher.compute_ff_bytes()
            if not step:
                self._guessed.add(len(self._text))
                step = self._character(after_mark=after_mark)
            if not step or not self._matcher.consume_tokens(self._vocabulary.tokenizer.tokenize_bytes(step)):
                break
            self._text += step
        tokens = self._vocabulary.tokenizer.tokenize_bytes(self._text)[:most]
        ends = list(accumulate(len(self._vocabulary.spelled(token)) for token in tokens))
        spans = pairwise((0, *ends))
        return Guess(tokens, [self._guessed.isdisjoint(range(start, end)) for start, end in spans])

    def _character(self, *, after_mark: bool) -> bytes:
        """The next one: a space after a mark, where it may stand, else the only one that is no space; or nothing."""
        if is_free(self._matcher, self._vocabulary):
            return b""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask)
        allowed = self._vocabulary.characters(self._mask[0])
        others = allowed.lstrip(b" ")
        if after_mark and len(others) < len(allowed):
            return b" "
        return others if len(others) == 1 else b""


def is_free(matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> bool:
    """Whether any letter may come next, as far as two of them tell: a mask of free text would take much longer."""
    tokens = map(vocabulary.token_of, _LETTERS)
    return all(token is not None and matcher.validate_tokens([token]) == 1 for token in tokens)


def _is_spaced(text: bytes) -> bool:
    """Whether JSON that goes on like this has a space after marks."""
    return b'": ' in text or b'", ' in text or not (b'":' in text or b'",' in text)
