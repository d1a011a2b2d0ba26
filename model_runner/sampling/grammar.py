"""Grammars that hold an output to a form, by llguidance.

A matcher follows one choice and only ever moves forward, with tokens that are committed: verification samples level by
level, so a draft that is rejected was never taken in. That matters: llguidance's rollback can leave stale masks behind.
What a matcher allows depends on its grammar and the tokens before, and on nothing else; so a choice that is admitted
again gets a new matcher and replays its output.
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
from typing import TYPE_CHECKING, Final

import llguidance
import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from model_runner.contract import Failure
from model_runner.processes import available_cores

if TYPE_CHECKING:
    import llguidance


Mask = NDArray[np.int32]
"""A bit for each token of the vocabulary: token t is bit t % 32 of word t // 32."""
_PRINTABLE: Final = range(0x20, 0x7F)
_CONTROL: Final = b"\xff"


class Vocabulary:
    """What its tokens spell."""

    def __init__(self, tokenizer: "llguidance.LLTokenizer") -> None:
        self.tokenizer = tokenizer
        self.num_words = -(-tokenizer.vocab_size // 32)
        spelled = {character: tokenizer.greedy_tokenize(chr(character)) for character in _PRINTABLE}
        single = {character: tokens[0] for character, tokens in spelled.items() if len(tokens) == 1}
        self._single = single
        self._characters = np.array(list(single), dtype=np.uint8)
        self._tokens = np.array(list(single.values()), dtype=np.int32)

    def spelled(self, token: int) -> bytes:
        """The token's bytes; after 0xFF if it is a control token."""
        text: bytes = self.tokenizer.decode_bytes([token])
        return _CONTROL + text if self.tokenizer.is_special_token(token) else text

    def first_of(self, text: bytes) -> int:
        """The first token of a text in this spelling."""
        head, _, rest = text.partition(_CONTROL)
        return int(self.tokenizer.tokenize_bytes(head or rest)[0])

    def token_of(self, character: int) -> int | None:
        """The token that is this printable character of ASCII, if there is one."""
        return self._single.get(character)

    def characters(self, mask: Mask) -> bytes:
        """The printable ones of ASCII, as far as they are tokens by themselves, that a mask allows, in order."""
        is_allowed = (mask[self._tokens // 32] >> self._tokens % 32) & 1
        return self._characters[is_allowed.astype(np.bool_)].tobytes()


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


_MOST_KEPT: Final = 256
"""Matchers that wait to be used ..."""
_MOST_CHARACTERS: Final = 4_000_000
"""... and characters of their grammars together: compiled, each is 10 to 50 bytes."""
_COSTLY_S: Final = 0.02
"""CPU time of compiling from which a grammar is kept for all its choices."""
_MOST_COSTLY: Final = 32
"""Grammars that are kept so."""
_STEP_FUEL: Final = 1_000_000
"""Work of a lexer for one token: about 0.1 s. Grammars of good will need less than a fiftieth of it.

A token that is only asked about takes next to none: the limit is met where a mask is needed.
"""
_FIRST_FUEL: Final = 10_000_000
_ITEMS: Final = 50_000
"""Parser items of one mask. A JSON schema with 400 optional properties needs more than 20,000."""
_ITEMS_PER_ROW: Final = 2_000
_LARK_ITEMS: Final = 20_000
"""Parser items of one mask where a client wrote the grammar: it may be ambiguous, and a mask of 50,000 such items takes
0.5 s. A grammar of C's expressions needs 12,000."""
_LARK_ITEMS_PER_ROW: Final = 500
_STATES: Final = 1 << 15
"""That a lexer keeps: about 40 MB in all ..."""
_STATES_PER_TOKEN: Final = 8
"""... but as many more as an output passes through."""


class GrammarError(ValueError):
    """The grammar cannot be used with this model."""


class Matcher:
    """One output, and what its grammar allows next."""

    def __init__(
        self,
        inner: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        stop_token_ids: Collection[int],
        compile_again: Callable[[int], llguidance.LLMatcher],
    ) -> None:
        """
        Args:
            inner: of the grammar, at its beginning.
            vocabulary: which it is for.
            stop_token_ids: end the output, and are allowed where the grammar is satisfied and nowhere else.
            compile_again: makes another one like `inner` for an output of so many tokens.
        """
        self.inner = inner
        self._compile_again = compile_again
        self._tokens: list[int] = []
        """What `inner` has taken in."""
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
            self._tokens.append(token)
            if not self.inner.consume_token(token):
                self._begin_anew()

    def mask(self) -> Mask:
        """The tokens that may come next, [words]; none where there is a failure. Not to be changed."""
        self.wait()
        if self._mask is None:
            self._mask = np.zeros(self._vocabulary.num_words, dtype=np.int32)
            self._fill(self._mask)
            self._settle(self._mask)
        return self._mask

    def _fill(self, mask: Mask) -> None:
        llguidance.numpy.fill_next_token_bitmask(self.inner, mask[np.newaxis])

    def _settle(self, mask: Mask) -> None:
        """Let the tokens that end the output into the mask where the output may end, and only there."""
        if self.inner.is_error():
            self._begin_anew()
            self._fill(mask)
        if self.inner.is_error():
            mask.fill(0)
            return
        self._ends.clear(mask)
        if self.inner.is_accepting():
            self._stops.set(mask)

    def _begin_anew(self) -> None:
        """After a limit, which the lexer may have met for the sake of outputs that did not come.

        What counts is whether one that knows nothing but this output meets it too.
        """
        self.inner = self._compile_again(len(self._tokens))
        self.inner.consume_tokens(self._tokens)

    def allows(self, token: int) -> bool:
        """Whether it may come next, as far as that can be told without a mask.

        Near a limit it may say no where the mask, for which a matcher begins anew, says yes; never the other way round.
        """
        self.wait()
        if token in self._stop_ids:
            return bool(self.inner.is_accepting())
        return token not in self._end_ids and self.inner.validate_tokens([token]) == 1

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

    def guess(self, output: Sequence[int], most: int) -> Guess:
        """What probably comes next: what must, and the least space where the grammar leaves only that open.

        A space stands after a comma or colon if one did so before. Other tokens may spell the same text.

        Args:
            output: the last tokens, in whose manner it goes on.
            most: how many tokens are wanted.
        """
        self.wait()
        if self._has_ended or self.inner.is_stopped() or is_free(self.inner, self._vocabulary):
            return Guess()
        before = self._vocabulary.tokenizer.decode_bytes(list(output))
        return LookAhead(self.inner.deep_copy(), self._vocabulary).guess(before, most)


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

    A cheap grammar is compiled for each choice, a costly one is compiled once and copied. Copies share a lexer: they
    wait for each other, and what one has computed counts for all when a limit is met. Either way a matcher allows the
    same tokens.
    """

    def __init__(self, read_tokenizer: Callable[[], str], vocab_size: int) -> None:
        """`read_tokenizer` returns the text of tokenizer.json."""
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._loading = Lock()
        self._lock = Lock()
        self._ready: OrderedDict[str, list[llguidance.LLMatcher]] = OrderedDict()
        self._num_ready = self._num_characters = 0
        self._costly: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        """At their beginnings, to be copied."""
        self._being_compiled: dict[str, Future[None]] = {}
        self._filler = ThreadPoolExecutor(1, "masks")
        self._executor = llguidance.LLExecutor(available_cores())

    def load(self) -> None:
        """Make the vocabulary: for a large one that takes seconds, in which no other thread of Python gets a turn."""
        with suppress(GrammarError):  # the first grammar will tell
            self.vocabulary  # noqa: B018 - made now

    @property
    def vocabulary(self) -> Vocabulary:
        """Made at first use, if not before. Raises GrammarError if the model has none."""
        with self._loading:
            if self._vocabulary is None:
                try:
                    text = self._read_tokenizer()
                    self._vocabulary = Vocabulary(llguidance.LLTokenizer(text, n_vocab=self._vocab_size))
                except (OSError, ValueError) as error:
                    raise GrammarError(
                        f"grammars and bounds on reasoning cannot be used with this model's tokenizer: {error}"
                    ) from error
            return self._vocabulary

    def prepare(self, grammar: str | None, count: int) -> None:
        """Compile a grammar for so many choices; None: only the vocabulary is needed.

        Raises GrammarError if that is not possible.
        """
        if grammar is None:
            self.vocabulary  # noqa: B018 - made now, if not before
            return
        with self._alone(grammar):
            with self._lock:
                is_known = grammar in self._costly
            if not is_known:
                self._prepare(grammar, min(count, max(_MOST_CHARACTERS // len(grammar), 1), _MOST_KEPT))

    @contextmanager
    def _alone(self, grammar: str) -> Iterator[None]:
        """Within it, no other thread prepares this grammar: it may turn out to be costly."""
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
        """A matcher that has seen this output, after a text that the grammar allows.

        Raises GrammarError if the grammar does not compile.
        """
        inner = self._prepared(grammar) or self._compile(grammar, len(output))
        matcher = Matcher(inner, self.vocabulary, stop_token_ids, partial(self._compile_again, grammar))
        for token in (*self.vocabulary.tokenizer.greedy_tokenize(prefix), *output):
            matcher.advance(token)
        return matcher

    def fill_masks(self, matchers: Sequence[Matcher], *, beside: bool) -> None:
        """Compute what these allow next in several threads, or begin to, beside the caller's."""
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
        if beside:
            self._filler.submit(self._fill, rows, masks, work)
        else:
            self._fill(rows, masks, work)

    def _fill(
        self, rows: list[tuple[llguidance.LLMatcher, int]], masks: NDArray[np.int32], work: "Future[None]"
    ) -> None:
        """Into these rows of the masks; `work` is done then."""
        try:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, rows, masks)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits
            work.set_exception(error)
        else:
            work.set_result(None)

    def _prepared(self, grammar: str) -> llguidance.LLMatcher | None:
        """A matcher at its beginning, if one is there or can be copied."""
        with self._lock:
            if grammar in self._costly:
                self._costly.move_to_end(grammar)
                return self._costly[grammar].deep_copy()
            return self._take(grammar) if grammar in self._ready else None

    def _compile_again(self, grammar: str, num_tokens: int) -> llguidance.LLMatcher:
        """For an output of so many tokens that met a limit. If it had a copy, other copies would meet it as well."""
        with self._lock:
            self._costly.pop(grammar, None)
        return self._compile(grammar, num_tokens)

    def _take(self, grammar: str) -> llguidance.LLMatcher:
        """One of those that are ready. Only for who holds the lock."""
        ready = self._ready[grammar]
        self._num_ready -= 1
        self._num_characters -= len(grammar)
        inner = ready.pop()
        if not ready:
            del self._ready[grammar]
        return inner

    def _compile(self, grammar: str, num_tokens: int) -> llguidance.LLMatcher:
        """For an output of so many tokens, or some more."""
        matcher = llguidance.LLMatcher(
            self.vocabulary.tokenizer, grammar, log_level=0, limits=_limits(grammar, num_tokens)
        )
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher


def _limits(grammar: str, num_tokens: int) -> llguidance.LLParserLimits:
    """The limits of a matcher for an output of so many tokens.

    The lexer's depend on what was computed before, unlike the parser's; see Matcher._begin_anew.
    """
    is_written_by_client = "%lark" in grammar
    return llguidance.LLParserLimits(
        max_items_in_row=_LARK_ITEMS_PER_ROW if is_written_by_client else _ITEMS_PER_ROW,
        step_max_items=_LARK_ITEMS if is_written_by_client else _ITEMS,
        step_lexer_fuel=_STEP_FUEL,
        initial_lexer_fuel=_FIRST_FUEL,
        max_lexer_states=_STATES + _STATES_PER_TOKEN * num_tokens,
    )
