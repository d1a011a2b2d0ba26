"""Structured output: grammars that constrain an output, compiled and evaluated by llguidance.

A matcher follows one choice and only moves forward, with committed tokens. Verification samples level by level, so it
never takes in rejected drafts; llguidance's rollback could leave stale masks behind. A matcher's result depends only on
its grammar and the previous tokens, so a re-admitted choice gets a new matcher and replays its output.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from threading import Lock
from typing import Final

import llguidance
import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from model_runner.contract import Failure
from model_runner.processes import available_cores

Mask = NDArray[np.int32]
"""One bit per token of the vocabulary: token t is bit t % 32 of word t // 32."""
_PRINTABLE: Final = range(0x20, 0x7F)
_CONTROL: Final = b"\xff"


class TokenBytes:
    """The bytes of the vocabulary's tokens."""

    def __init__(self, tokenizer: "llguidance.LLTokenizer") -> None:
        self.tokenizer = tokenizer
        self.num_words = -(-tokenizer.vocab_size // 32)
        spelled = {character: tokenizer.greedy_tokenize(chr(character)) for character in _PRINTABLE}
        single = {character: tokens[0] for character, tokens in spelled.items() if len(tokens) == 1}
        self._single = single
        self._characters = np.array(list(single), dtype=np.uint8)
        self._tokens = np.array(list(single.values()), dtype=np.int32)

    def spelled(self, token: int) -> bytes:
        """The token's bytes. Control tokens are prefixed with 0xFF."""
        text: bytes = self.tokenizer.decode_bytes([token])
        return _CONTROL + text if self.tokenizer.is_special_token(token) else text

    def first_of(self, text: bytes) -> int:
        """The first token of `text`, which is spelled as `spelled` does."""
        head, _, rest = text.partition(_CONTROL)
        return int(self.tokenizer.tokenize_bytes(head or rest)[0])

    def token_of(self, character: int) -> int | None:
        """The token that consists of this printable ASCII character, or None."""
        return self._single.get(character)

    def characters(self, mask: Mask) -> bytes:
        """The printable ASCII characters that are single tokens and that the mask allows, in order."""
        is_allowed = (mask[self._tokens // 32] >> self._tokens % 32) & 1
        return self._characters[is_allowed.astype(np.bool_)].tobytes()


_BYTES_PER_TOKEN: Final = 4
"""Bytes of look-ahead per wanted token."""
_LETTERS: Final = b"ae"


@dataclass(frozen=True, slots=True)
class GuessedTokens:
    """The probable next tokens."""

    tokens: Sequence[int] = ()
    is_forced: Sequence[bool] = ()
    """For each token, whether the grammar allows no other text than this token's after the ones before."""


class LookAhead:
    """Extends a copy of a matcher for as long as there is only one way to continue."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: TokenBytes) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._mask = np.zeros((1, vocabulary.num_words), dtype=np.int32)
        self._text = b""
        self._guessed: set[int] = set()
        """Positions in the text that were guessed."""

    def guess(self, before: bytes, most: int) -> GuessedTokens:
        """At most `most` tokens that follow the text `before`."""
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
        return GuessedTokens(tokens, [self._guessed.isdisjoint(range(start, end)) for start, end in spans])

    def _character(self, *, after_mark: bool) -> bytes:
        """The next character: a space after a colon or comma if allowed, or else the only allowed non-space. May be
        empty.
        """
        if is_free(self._matcher, self._vocabulary):
            return b""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask)
        allowed = self._vocabulary.characters(self._mask[0])
        others = allowed.lstrip(b" ")
        if after_mark and len(others) < len(allowed):
            return b" "
        return others if len(others) == 1 else b""


def is_free(matcher: llguidance.LLMatcher, vocabulary: TokenBytes) -> bool:
    """Whether free text may come next, judged by two letters: a mask of free text would take much longer."""
    tokens = map(vocabulary.token_of, _LETTERS)
    return all(token is not None and matcher.validate_tokens([token]) == 1 for token in tokens)


def _is_spaced(text: bytes) -> bool:
    """Whether JSON that continues this text puts a space after colons and commas."""
    return b'": ' in text or b'", ' in text or not (b'":' in text or b'",' in text)


_MOST_KEPT: Final = 256
"""Maximum number of compiled matchers kept for later use."""
_MOST_CHARACTERS: Final = 4_000_000
"""Maximum total characters of their grammars; compiled, each takes 10 to 50 bytes."""
_COSTLY_S: Final = 0.02
"""Compile time, in CPU seconds, from which a grammar is kept and copied for all its choices."""
_MOST_COSTLY: Final = 32
"""Maximum number of grammars kept this way."""
_STEP_FUEL: Final = 1_000_000
"""Lexer work allowed for one token, about 0.1 s. Ordinary grammars need less than a fiftieth.

Checking a single token takes almost none: the limit applies when a mask is computed."""
_FIRST_FUEL: Final = 10_000_000
_ITEMS: Final = 50_000
"""Parser items per mask. A JSON schema with 400 optional properties needs more than 20,000."""
_ITEMS_PER_ROW: Final = 2_000
_LARK_ITEMS: Final = 20_000
"""Parser items per mask of a client's own grammar. It may be ambiguous, and 50,000 items then take 0.5 s. A grammar of
C expressions needs 12,000."""
_LARK_ITEMS_PER_ROW: Final = 500
_STATES: Final = 1 << 15
"""Lexer states kept, about 40 MB in total."""
_STATES_PER_TOKEN: Final = 8
"""Additional lexer states per output token."""


class GrammarError(ValueError):
    """The grammar cannot be used with this model."""


class Matcher:
    """Follows one output and computes the tokens its grammar allows next."""

    def __init__(
        self,
        inner: llguidance.LLMatcher,
        vocabulary: TokenBytes,
        stop_token_ids: Collection[int],
        compile_again: Callable[[int], llguidance.LLMatcher],
    ) -> None:
        """Wraps a compiled grammar.

        Args:
            inner: llguidance's matcher at the start of the grammar.
            vocabulary: the vocabulary it was compiled for.
            stop_token_ids: tokens that end the output; allowed only where the grammar may end.
            compile_again: compiles a new matcher like `inner` for an output of the given number of tokens.
        """
        self.inner = inner
        self._compile_again = compile_again
        self._tokens: list[int] = []
        """The tokens that `inner` has consumed."""
        self._vocabulary = vocabulary
        self._stop_ids = frozenset(stop_token_ids)
        self._stops = _Bits(self._stop_ids)
        self._end_ids = self._stop_ids | frozenset(vocabulary.tokenizer.eos_tokens)
        self._ends = _Bits(self._end_ids)
        self._mask: Mask | None = None
        self._being_filled: Future[None] | None = None
        self._has_ended = False

    @property
    def failure(self) -> Failure | None:
        """Why it can no longer compute masks: the grammar exceeded llguidance's limits. None if it can."""
        self.wait()
        if not self.inner.is_error():
            return None
        reason = self.inner.get_error().partition("\n")[0]
        return Failure(f"the output exceeded the limits of its grammar: {reason}", by_request=True)

    @property
    def is_stopped(self) -> bool:
        """Whether only a token that ends the output may follow."""
        self.wait()
        return self.inner.is_stopped()

    def advance(self, token: int) -> None:
        """Consume a generated token."""
        self.wait()
        self._mask = None
        if token in self._stop_ids:
            self._has_ended = True
        elif not self._has_ended:
            self._tokens.append(token)
            if not self.inner.consume_token(token):
                self._recompile()

    def mask(self) -> Mask:
        """The tokens that may come next, [words]; empty after a failure. Do not modify."""
        self.wait()
        if self._mask is None:
            self._mask = np.zeros(self._vocabulary.num_words, dtype=np.int32)
            self._fill(self._mask)
            self._settle(self._mask)
        return self._mask

    def _fill(self, mask: Mask) -> None:
        llguidance.numpy.fill_next_token_bitmask(self.inner, mask[np.newaxis])

    def _settle(self, mask: Mask) -> None:
        """Allow end tokens in the mask exactly where the output may end."""
        if self.inner.is_error():
            self._recompile()
            self._fill(mask)
        if self.inner.is_error():
            mask.fill(0)
            return
        self._ends.clear(mask)
        if self.inner.is_accepting():
            self._stops.set(mask)

    def _recompile(self) -> None:
        """Recompile and replay the output after a limit was hit.

        The lexer may have spent its limit on outputs that did not happen. What counts is whether a matcher that saw
        only this output hits the limit too.
        """
        self.inner = self._compile_again(len(self._tokens))
        self.inner.consume_tokens(self._tokens)

    def allows(self, token: int) -> bool:
        """Whether the token may come next, as far as this can be decided without a mask.

        Near a limit it may say no where the mask, computed with a new matcher, says yes; never the reverse.
        """
        self.wait()
        if token in self._stop_ids:
            return bool(self.inner.is_accepting())
        return token not in self._end_ids and self.inner.validate_tokens([token]) == 1

    def fill_later(self, mask: Mask) -> bool:
        """Schedule the mask to be written to `mask`. Returns False if it is already known or scheduled."""
        if self._mask is not None or self._being_filled is not None:
            return False
        self._mask = mask
        return True

    def filled_by(self, work: "Future[None]") -> None:
        """Set the future that completes when the mask is written."""
        self._being_filled = work

    def wait(self) -> None:
        """Wait until no other thread writes the mask."""
        if self._being_filled is not None:
            work, self._being_filled = self._being_filled, None
            work.result()
            assert self._mask is not None
            self._settle(self._mask)

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the grammar allows in sequence. Tokens after an end token do not count."""
        self.wait()
        end = next((place for place, token in enumerate(tokens) if token in self._stop_ids), len(tokens))
        fits = int(self.inner.validate_tokens(list(tokens[:end])))
        return len(tokens) if fits == end < len(tokens) else fits

    def guess(self, output: Sequence[int], most: int) -> GuessedTokens:
        """The probable next tokens: forced text, and minimal whitespace where the grammar leaves only that open.

        A space follows a comma or colon if one did before. Other tokens may spell the same text.

        Args:
            output: the last tokens, whose style is continued.
            most: how many tokens are wanted.
        """
        self.wait()
        if self._has_ended or self.inner.is_stopped() or is_free(self.inner, self._vocabulary):
            return GuessedTokens()
        before = self._vocabulary.tokenizer.decode_bytes(list(output))
        return LookAhead(self.inner.deep_copy(), self._vocabulary).guess(before, most)


class _Bits:
    """Token ids as bits of a mask."""

    def __init__(self, tokens: Collection[int]) -> None:
        ids = np.array(sorted(tokens), dtype=np.int64)
        self._words = ids // 32
        self._bits = (np.uint32(1) << (ids % 32).astype(np.uint32)).view(np.int32)

    def set(self, mask: Mask) -> None:
        np.bitwise_or.at(mask, self._words, self._bits)

    def clear(self, mask: Mask) -> None:
        np.bitwise_and.at(mask, self._words, ~self._bits)


class Grammars:
    """Compiles grammars for one vocabulary, ahead of the steps where possible. Thread-safe.

    A cheap grammar is compiled for each choice; a costly one is compiled once and copied. Copies share a lexer: they
    wait for each other, and their work counts towards a common limit. Both ways a matcher allows the same tokens.
    """

    def __init__(self, find_tokenizer: Callable[[], str], vocab_size: int) -> None:
        """`find_tokenizer` returns the path of tokenizer.json, or its text, which takes up to four times its size."""
        self._find_tokenizer = find_tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: TokenBytes | None = None
        self._loading = Lock()
        self._lock = Lock()
        self._ready: OrderedDict[str, list[llguidance.LLMatcher]] = OrderedDict()
        self._num_ready = self._num_characters = 0
        self._costly: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        """Matchers at the start of the grammar, to be copied."""
        self._being_compiled: dict[str, Future[None]] = {}
        self._filler = ThreadPoolExecutor(1, "masks")
        self._executor = llguidance.LLExecutor(available_cores())

    def load(self) -> None:
        """Create the vocabulary. For a large one this takes seconds, during which no other Python thread runs."""
        with suppress(GrammarError):  # the first grammar will raise it
            self.vocabulary  # noqa: B018 - made now

    @property
    def vocabulary(self) -> TokenBytes:
        """Created at first use. Raises GrammarError if the model has no usable tokenizer."""
        with self._loading:
            if self._vocabulary is None:
                try:
                    tokenizer = llguidance.LLTokenizer(self._find_tokenizer(), n_vocab=self._vocab_size)
                    self._vocabulary = TokenBytes(tokenizer)
                except BaseException as error:  # a panic's class cannot be imported
                    if not isinstance(error, OSError | ValueError) and type(error).__name__ != "PanicException":
                        raise
                    raise GrammarError(
                        f"this model's tokenizer supports neither grammars nor reasoning limits: {error}"
                    ) from error
            return self._vocabulary

    def prepare(self, grammar: str | None, count: int) -> None:
        """Compile a grammar for `count` choices. With None, only create the vocabulary.

        Raises GrammarError if this fails.
        """
        if grammar is None:
            self.vocabulary  # noqa: B018 - made now, if not before
            return
        with self._exclusively(grammar):
            with self._lock:
                is_known = grammar in self._costly
            if not is_known:
                self._prepare(grammar, min(count, max(_MOST_CHARACTERS // len(grammar), 1), _MOST_KEPT))

    @contextmanager
    def _exclusively(self, grammar: str) -> Iterator[None]:
        """Prevents other threads from preparing the same grammar, which may be costly."""
        work: Future[None] = Future()
        while True:
            with self._lock:
                other = self._being_compiled.setdefault(grammar, work)
            if other is work:
                break
            other.result()
        try:
            yield
        finally:
            with self._lock:
                del self._being_compiled[grammar]
            work.set_result(None)

    def _prepare(self, grammar: str, count: int) -> None:
        begun = time.thread_time()
        first = self._compile(grammar, 0)
        if time.thread_time() - begun >= _COSTLY_S:
            with self._lock:
                self._costly[grammar] = first
                while len(self._costly) > _MOST_COSTLY:
                    self._costly.popitem(last=False)
            return
        made = [first, *(self._compile(grammar, 0) for _ in range(count - 1))]
        with self._lock:
            self._ready.setdefault(grammar, []).extend(made)
            self._ready.move_to_end(grammar)
            self._num_ready += len(made)
            self._num_characters += len(made) * len(grammar)
            while self._num_ready > 1 and (self._num_ready > _MOST_KEPT or self._num_characters > _MOST_CHARACTERS):
                self._take(next(iter(self._ready)))

    def matcher(
        self, grammar: str, stop_token_ids: Collection[int], output: Sequence[int], prefix: str = ""
    ) -> Matcher:
        """A matcher that has consumed `prefix` and `output`.

        Raises GrammarError if the grammar does not compile.
        """
        inner = self._prepared(grammar) or self._compile(grammar, len(output))
        matcher = Matcher(inner, self.vocabulary, stop_token_ids, partial(self._compile_again, grammar))
        for token in (*self.vocabulary.tokenizer.greedy_tokenize(prefix), *output):
            matcher.advance(token)
        return matcher

    def fill_masks(self, matchers: Sequence[Matcher], *, in_background: bool) -> None:
        """Compute the masks of these matchers in several threads. With `in_background`, return before they are done."""
        masks = np.zeros((len(matchers), self.vocabulary.num_words), dtype=np.int32)
        wanted = [
            (matcher, row)
            for row, (matcher, mask) in enumerate(zip(matchers, masks, strict=True))
            if matcher.fill_later(mask)
        ]
        if not wanted:
            return
        rows = [(matcher.inner, row) for matcher, row in wanted]
        work: Future[None] = Future()
        for matcher, _ in wanted:
            matcher.filled_by(work)
        if in_background:
            self._filler.submit(self._fill, rows, masks, work)
        else:
            self._fill(rows, masks, work)

    def _fill(
        self, rows: list[tuple[llguidance.LLMatcher, int]], masks: NDArray[np.int32], work: "Future[None]"
    ) -> None:
        """Compute the masks into these rows, then complete `work`."""
        try:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, rows, masks)
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            work.set_exception(error)
        else:
            work.set_result(None)

    def _prepared(self, grammar: str) -> llguidance.LLMatcher | None:
        """A fresh matcher, prepared or copied, or None."""
        with self._lock:
            if grammar in self._costly:
                self._costly.move_to_end(grammar)
                return self._costly[grammar].deep_copy()
            return self._take(grammar) if grammar in self._ready else None

    def _compile_again(self, grammar: str, num_tokens: int) -> llguidance.LLMatcher:
        """Compile for an output that hit a limit. It is not copied any more: copies would hit the limit too."""
        with self._lock:
            self._costly.pop(grammar, None)
        return self._compile(grammar, num_tokens)

    def _take(self, grammar: str) -> llguidance.LLMatcher:
        """Take a prepared matcher. Call with the lock held."""
        ready = self._ready[grammar]
        self._num_ready -= 1
        self._num_characters -= len(grammar)
        inner = ready.pop()
        if not ready:
            del self._ready[grammar]
        return inner

    def _compile(self, grammar: str, num_tokens: int) -> llguidance.LLMatcher:
        """Compile for an output of `num_tokens` tokens, or some more."""
        matcher = llguidance.LLMatcher(
            self.vocabulary.tokenizer, grammar, log_level=0, limits=_limits(grammar, num_tokens)
        )
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher


def _limits(grammar: str, num_tokens: int) -> llguidance.LLParserLimits:
    """Limits of a matcher for an output of `num_tokens` tokens.

    The lexer's limits depend on earlier work, unlike the parser's; `Matcher._recompile` handles that.
    """
    is_written_by_client = "%lark" in grammar
    return llguidance.LLParserLimits(
        max_items_in_row=_LARK_ITEMS_PER_ROW if is_written_by_client else _ITEMS_PER_ROW,
        step_max_items=_LARK_ITEMS if is_written_by_client else _ITEMS,
        step_lexer_fuel=_STEP_FUEL,
        initial_lexer_fuel=_FIRST_FUEL,
        max_lexer_states=_STATES + _STATES_PER_TOKEN * num_tokens,
    )
