"""Grammars that hold an output to a form, by llguidance.

A matcher follows one choice and only ever moves forward, with tokens that are committed: verification samples level by
level, so a draft that is rejected was never taken in. That matters: llguidance's rollback can leave stale masks behind.
What a matcher allows depends on its grammar and the tokens before, and on nothing else; so a choice that is admitted
again gets a new matcher and replays its output.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Final

import llguidance
import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from model_runner.contract import Failure

Mask = NDArray[np.int32]
"""A bit for each token of the vocabulary: token t is bit t % 32 of word t // 32."""
_MOST_KEPT: Final = 256
"""Matchers that wait to be used."""
_LIMITS: Final = llguidance.LLParserLimits(
    step_lexer_fuel=20_000_000, initial_lexer_fuel=100_000_000, max_lexer_states=10_000_000
)
"""What these count depends on what was computed before, unlike the other limits. So they are out of reach, and the size
of a grammar is limited where it comes in."""


class GrammarError(ValueError):
    """The grammar cannot be used with this model."""


class Matcher:
    """One output, and what its grammar allows next."""

    def __init__(
        self, matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer, stop_token_ids: Collection[int]
    ) -> None:
        """`stop_token_ids` end the output, and are allowed where the grammar is satisfied and nowhere else."""
        self.inner = matcher
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_token_ids)
        self._stops = _Bits(self._stop_ids)
        self._ends = _Bits(self._stop_ids | frozenset(tokenizer.eos_tokens))
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._mask: Mask | None = None
        self._being_filled: Future[None] | None = None
        self._has_ended = False

    @property
    def failure(self) -> Failure | None:
        """Why it cannot say what comes next, if so: the grammar has grown too large for llguidance."""
        self.wait()
        if not self.inner.is_error():
            return None
        reason = self.inner.get_error().partition("\n")[0]
        return Failure(f"the output cannot be held to its grammar any longer: {reason}", by_request=True)

    @property
    def is_stopped(self) -> bool:
        """Whether nothing can follow but a token that ends the output."""
        self.wait()
        return self.inner.is_stopped()

    def advance(self, token: int) -> None:
        """Take in a token that was generated."""
        self.wait()
        self._mask = None
        if token in self._stop_ids:
            self._has_ended = True
        elif not self._has_ended:
            self.inner.consume_token(token)

    def mask(self) -> Mask:
        """The tokens that may come next, [words]. Not to be changed. Means nothing where there is a failure."""
        self.wait()
        if self._mask is None:
            self._mask = np.zeros(self._num_words, dtype=np.int32)
            llguidance.numpy.fill_next_token_bitmask(self.inner, self._mask[np.newaxis])
            self._settle(self._mask)
        return self._mask

    def _settle(self, mask: Mask) -> None:
        """Let the tokens that end the output into the mask where the output may end, and only there."""
        self._ends.clear(mask)
        if self.inner.is_accepting():
            self._stops.set(mask)

    def fill_later(self, mask: Mask) -> bool:
        """Have the mask written to this place; False if it is known, or being written, already."""
        if self._mask is not None or self._being_filled is not None:
            return False
        self._mask = mask
        return True

    def filled_by(self, work: "Future[None]") -> None:
        """The mask is there when this is done."""
        self._being_filled = work

    def wait(self) -> None:
        """Until nobody else writes to the mask."""
        if self._being_filled is not None:
            work, self._being_filled = self._being_filled, None
            work.result()
            assert self._mask is not None
            self._settle(self._mask)

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, one after the other, the grammar allows; those after one that ends do not count."""
        self.wait()
        end = next((place for place, token in enumerate(tokens) if token in self._stop_ids), len(tokens))
        fits = int(self.inner.validate_tokens(list(tokens[:end])))
        return len(tokens) if fits == end < len(tokens) else fits

    def forced(self) -> list[int]:
        """Tokens of the text that must come next, as far as there is only one; other tokens may spell it, too."""
        self.wait()
        tokens, _ = self._tokenizer.tokenize_partial(self.inner.compute_ff_bytes())
        return tokens


class _Bits:
    """Tokens as bits of a mask."""

    def __init__(self, tokens: Collection[int]) -> None:
        ids = np.array(sorted(tokens), dtype=np.int64)
        self._words = ids // 32
        self._bits = (np.uint32(1) << (ids % 32).astype(np.uint32)).view(np.int32)

    def set(self, mask: Mask) -> None:
        np.bitwise_or.at(mask, self._words, self._bits)

    def clear(self, mask: Mask) -> None:
        np.bitwise_and.at(mask, self._words, ~self._bits)


class Grammars:
    """Compiles grammars for one vocabulary, off the steps' path where there is time for it. Safe to use in threads.

    A grammar is compiled anew for each choice. Copies would be quicker, but share a lexer: they would wait for each
    other, and what one has computed would count for all.
    """

    def __init__(self, read_tokenizer: Callable[[], str], vocab_size: int) -> None:
        """`read_tokenizer` returns the text of tokenizer.json; it is called when the first grammar comes."""
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._loading = Lock()
        self._lock = Lock()
        self._ready: OrderedDict[str, list[llguidance.LLMatcher]] = OrderedDict()
        self._num_ready = 0
        self._filler = ThreadPoolExecutor(1, "masks")
        self._executor = llguidance.LLExecutor(max(1, (os.cpu_count() or 1) // 2))

    @property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """Made at first use, which takes seconds for large vocabularies. Raises GrammarError if there is none."""
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = llguidance.LLTokenizer(self._read_tokenizer(), n_vocab=self._vocab_size)
                except (OSError, ValueError) as error:
                    raise GrammarError(f"this model's tokenizer knows no grammars: {error}") from error
            return self._tokenizer

    def prepare(self, grammar: str, count: int) -> None:
        """Compile a grammar for so many choices. Raises GrammarError if that is not possible."""
        with self._lock:
            count -= len(self._ready.get(grammar, ()))
        made = [self._compile(grammar) for _ in range(min(count, _MOST_KEPT))]
        with self._lock:
            self._ready.setdefault(grammar, []).extend(made)
            self._ready.move_to_end(grammar)
            self._num_ready += len(made)
            while self._num_ready > _MOST_KEPT:
                _, dropped = self._ready.popitem(last=False)
                self._num_ready -= len(dropped)

    def matcher(self, grammar: str, stop_token_ids: Collection[int], output: Sequence[int]) -> Matcher:
        """A matcher that has seen this output. Raises GrammarError if the grammar does not compile."""
        with self._lock:
            ready = self._ready.get(grammar)
            inner = ready.pop() if ready else None
            self._num_ready -= inner is not None
            if not ready:
                self._ready.pop(grammar, None)
        matcher = Matcher(inner or self._compile(grammar), self.tokenizer, stop_token_ids)
        for token in output:
            matcher.advance(token)
        return matcher

    def fill_masks(self, matchers: Sequence[Matcher]) -> None:
        """Begin to compute what these allow next, in threads beside the caller's."""
        masks = np.zeros((len(matchers), -(-self._vocab_size // 32)), dtype=np.int32)
        wanted = [
            (matcher, row)
            for row, (matcher, mask) in enumerate(zip(matchers, masks, strict=True))
            if matcher.fill_later(mask)
        ]
        if not wanted:
            return
        rows = [(matcher.inner, row) for matcher, row in wanted]
        work = self._filler.submit(llguidance.numpy.fill_next_token_bitmask_par, self._executor, rows, masks)
        for matcher, _ in wanted:
            matcher.filled_by(work)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self.tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher
