"""The sampler's state: a slot for each running request, and rows gathered from slots for each step.

A row is a row of logits, not a request: a slot may have any number of rows in a step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.batch import IntArray, SampleRows
from model_runner.contract import Failure, SamplingParams
from model_runner.sampling.noise import Stream, noise_key, noise_keys
from model_runner.sampling.slot import SlotState, TokenValues
from model_runner.sampling.thinking import ThinkingBudget

if TYPE_CHECKING:
    from model_runner.sampling.grammar import Grammars, Matcher


@dataclass(frozen=True, slots=True)
class Entries:
    """Values for single entries of the logits. Duplicate entries have equal values. May be empty."""

    rows: Tensor  # [n] int64
    tokens: Tensor  # [n] int64
    values: Tensor  # [n] float64

    def __bool__(self) -> bool:
        return len(self.rows) > 0


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting's value for each row that uses it."""

    name: str
    """As in SamplingParams.sampler_order."""
    rows: Tensor  # [n] int64
    values: Tensor  # [n, 1] float64

    def take(self, logits: Tensor) -> Tensor:
        """The rows that use the setting, [n, vocab]; not a copy if all do."""
        return logits if len(self.rows) == len(logits) else logits.index_select(0, self.rows)

    def only(self, rows: Set[int]) -> "Setting":
        """The setting restricted to these rows."""
        left = [place for place, row in enumerate(self.rows.tolist()) if row in rows]
        return Setting(self.name, self.rows[left], self.values[left])

    def put(self, logits: Tensor, changed: Tensor) -> Tensor:
        """The logits with these rows replaced; may modify `logits`."""
        return changed if len(self.rows) == len(logits) else logits.index_copy_(0, self.rows, changed)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Everything the processors and the sampler need to know about the rows of one step.

    Greedy rows appear in no Setting except `least_share`.
    """

    sampling: tuple[SamplingParams, ...]
    """One per row."""
    positions: tuple[int, ...]
    """For each row, the number of tokens generated before."""
    takes_highest: bool
    """Whether every row takes the highest raw logit and none requests logprobs."""
    greedy: tuple[int, ...]
    """Rows with temperature 0."""
    whole: tuple[int, ...]
    """Rows that sample from the whole vocabulary, except tokens banned by grammars and other bans."""
    truncated: tuple[int, ...]
    """Rows that sample from the result of a truncation or from a list of allowed tokens."""
    listed: tuple[int, ...]
    """Rows that want candidates instead of a token. They are not in `greedy`, `whole` or `truncated`."""
    logit_bias: Entries
    allowed_rows: Tensor  # [n] int64: rows with a list of allowed tokens
    allowed: Entries  # the lists; the values are meaningless
    grammar_rows: Tensor  # [n] int64: rows with a grammar
    masks: Tensor  # [n, vocab] bool: tokens that their grammars allow
    failures: Mapping[int, Failure]
    """Rows whose grammar can no longer say what it allows."""
    banned: Entries  # values are -inf
    repetition: Entries  # values are the penalty
    output_penalty: Entries  # values are what to subtract
    dry: Entries  # values are what to subtract
    ending: Entries  # values are relative increases of the logit
    least_share: Setting | None
    """Plausibility threshold, SamplingParams.least_share."""
    truncations: tuple[Setting, ...]
    """Truncation steps of sampled rows, in each row's own order."""
    mirostat: tuple[int, ...]
    """Rows that need the surprise of their token."""
    stream: Stream = Stream.TARGET
    """Noise stream that tokens are drawn with."""

    def key(self, row: int, stream: Stream | None = None) -> int:
        """The noise key of a row, for `self.stream` by default."""
        sampling = self.sampling[row]
        return noise_key(sampling.seed, sampling.choice, self.stream if stream is None else stream, self.positions[row])

    def without_whole_temperature(self) -> "SamplingRows":
        """A copy without temperature for the rows in `whole`, which have no other setting."""
        if not self.whole:
            return self
        others = set(self.truncated)
        left = [used.only(others) if used.name == "temperature" else used for used in self.truncations]
        return replace(self, truncations=tuple(used for used in left if len(used.rows)))


NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class EarlySamplingPlan:
    """How a kernel samples the rows of a step at once, before the sampler runs. Rows that are not used are greedy.

    Tokens are sampled from the model's plain logits. If a grammar is the only other constraint, the token is kept if
    the grammar allows it: the winner among all tokens also wins among the allowed ones (except for the last bit of a
    score). So most tokens need no mask.
    """

    keys: NDArray[np.uint64]  # [R] of the noise
    temperatures: NDArray[np.float64]  # [R] 0 takes the highest logit
    choices: frozenset[int]
    """Choices whose rows are all sampled by this plan, by index in the batch."""
    with_grammar: frozenset[int] = frozenset()
    """Choices among these that have a grammar. The plan ignores it, so each token must be checked against the
    grammar."""

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Keys in the kernel's type, and temperatures."""
        return self.keys.view(np.int64), self.temperatures

    @classmethod
    def greedy(cls, num_rows: int) -> "EarlySamplingPlan":
        """A plan without choices."""
        return cls(np.zeros(num_rows, dtype=np.uint64), np.zeros(num_rows), frozenset())


@dataclass(frozen=True, slots=True)
class EarlyTokens:
    """The result of an EarlySamplingPlan."""

    tokens: Sequence[int] = ()
    """One per row of the step's logits; NO_TOKEN if the row is not finite."""
    choices: frozenset[int] = frozenset()
    """Choices for which these tokens are valid, as in EarlySamplingPlan."""


NO_EARLY_TOKENS = EarlyTokens()


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows of logits to sample from the tokens that grammars allow."""

    rows: Sequence[int]  # [count]
    keys: NDArray[np.uint64]  # [count] of the noise
    temperatures: NDArray[np.float64]  # [count] 0 takes the highest logit
    masks: NDArray[np.int32]  # [count, words], a grammar.Mask each


SampleAllowed = Callable[[Tensor, MaskedRows], Sequence[int]]
"""Samples logits [rows, vocab] at the given rows; NO_TOKEN where no token can be chosen."""


class SamplingState:
    """The slots of all running requests. Checks token ids against the vocabulary, but not number ranges."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device, grammars: "Grammars | None" = None
    ) -> None:
        """Without `grammars`, requests must not have a grammar or a reasoning limit."""
        self._slots: list[SlotState | None] = [None] * max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._no_entries = Entries(none, none, none.double())
        self._no_masks = torch.empty(0, vocab_size, dtype=torch.bool, device=device)
        self._grammars = grammars

    def admit(
        self,
        slot: int,
        sampling: SamplingParams,
        prompt: Iterable[int],
        output: Sequence[int] = (),
        sampler_state: float | None = None,
        forked_from: int | None = None,
    ) -> None:
        """Fill a free slot. With `output`, the request continues as if these tokens had been committed one by one.

        `sampler_state` must then be the state after these tokens. `forked_from` is the slot of
        AdmittedRequest.forked_from; it only saves time.

        Raises ValueError if the slot is occupied, or if the settings contain an empty bad word, a token id outside the
        vocabulary or a grammar that does not compile. The message names the field.
        """
        if self._slots[slot] is not None:
            raise ValueError(f"slot {slot} is taken")
        num_common = max(len(output) - 1, 0)
        state = None if forked_from is None else self._slot(forked_from).fork(sampling, num_common)
        if state is None:
            _check_tokens(sampling, self._vocab_size)
            state = SlotState(sampling, self._vocab_size, prompt, output, self._thinking(sampling, output))
        else:
            for token in output[num_common:]:
                state.commit(token)
        state.matcher = self._matcher(sampling, output)
        if sampler_state is not None:
            state.mu = sampler_state
        self._slots[slot] = state

    def commit(self, slot: int, token: int, surprise: float | None = None) -> None:
        """Append a generated token to the slot's history. `surprise` is the value the sampler returned."""
        self._slot(slot).commit(token, surprise)

    def sampler_state(self, slot: int) -> float | None:
        """The state that `admit` needs, in addition to the tokens, to restore the slot."""
        return self._slot(slot).mu

    def release(self, slot: int) -> None:
        """Free the slot."""
        self._slots[slot] = None

    def _matcher(self, sampling: SamplingParams, output: Sequence[int]) -> "Matcher | None":
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            raise ValueError("grammar: not supported, because the model has no tokenizer")
        return self._grammars.matcher(sampling.grammar, sampling.stop_token_ids, output, sampling.grammar_prefix)

    def _thinking(self, sampling: SamplingParams, output: Sequence[int]) -> ThinkingBudget | None:
        if sampling.thinking is None:
            return None
        if self._grammars is None:
            raise ValueError("thinking: not supported, because the model has no tokenizer")
        return ThinkingBudget(sampling.thinking, self._grammars.vocabulary, output)

    def fill_masks(self, slots: Sequence[int], *, in_background: bool = False) -> None:
        """Compute the masks of the slots' grammars, with `in_background` in another thread."""
        matchers = [matcher for slot in slots if (matcher := self._slot(slot).matcher) is not None]
        if matchers and self._grammars is not None:
            self._grammars.fill_masks(matchers, in_background=in_background)

    def matcher(self, slot: int) -> "Matcher | None":
        """The matcher of the slot's grammar, or None."""
        return self._slot(slot).matcher

    def allows(self, slot: int, token: int) -> bool:
        """Whether the slot's grammar allows this token next. True without a grammar."""
        matcher = self._slot(slot).matcher
        return matcher is None or matcher.allows(token)

    def masked(self, rows: Sequence[int], slots: Sequence[int]) -> MaskedRows:
        """How to sample the next token of slots with grammars at these rows, for slots that need only a token."""
        states = [self._slot(slot) for slot in slots]
        return MaskedRows(
            rows,
            noise_keys(
                np.array([state.noise for state in states], dtype=np.uint64),
                np.array([state.num_output for state in states]),
            ),
            np.array([state.sampling.temperature for state in states]),
            np.stack([state.matcher.mask() for state in states if state.matcher is not None]),
        )

    def rows(self, slots: Sequence[int]) -> SamplingRows:
        """The sampling state for the next token of each slot. A slot may appear more than once."""
        states = [self._slot(slot) for slot in slots]
        picked = [(row, state) for row, state in enumerate(states) if not state.is_listed]
        drawn = [(row, state) for row, state in picked if state.sampling.temperature > 0]
        least = [(row, state.sampling.least_share) for row, state in picked if state.sampling.least_share]
        shares = [(row, {"least_share": share}) for row, share in least]
        constrained = [(row, state) for row, state in enumerate(states) if state.constrains]
        held = [(row, state.matcher) for row, state in constrained if state.matcher is not None]
        allowed = [(row, some) for row, state in constrained if (some := state.allowed()) is not None]
        return SamplingRows(
            sampling=tuple(state.sampling for state in states),
            positions=tuple(state.num_output for state in states),
            takes_highest=all(state.takes_highest for state in states),
            greedy=tuple(row for row, state in picked if state.sampling.temperature == 0),
            whole=tuple(row for row, state in drawn if not state.truncates),
            truncated=tuple(row for row, state in drawn if state.truncates),
            listed=tuple(row for row, state in enumerate(states) if state.is_listed),
            logit_bias=self._entries([(row, state.logit_bias) for row, state in constrained]),
            allowed_rows=self._row_numbers([row for row, _ in allowed]),
            allowed=self._entries(allowed),
            grammar_rows=self._row_numbers([row for row, _ in held]),
            masks=self._masks([matcher for _, matcher in held]),
            failures={row: failure for row, matcher in held if (failure := matcher.failure) is not None},
            banned=self._entries([(row, state.banned()) for row, state in constrained]),
            repetition=self._entries([(row, state.repetition_penalty()) for row, state in constrained]),
            output_penalty=self._entries([(row, state.output_penalty()) for row, state in constrained]),
            dry=self._entries([(row, state.dry_penalty()) for row, state in constrained]),
            ending=self._entries([(row, state.end_token_growth()) for row, state in constrained]),
            least_share=self._setting("least_share", shares),
            truncations=self._truncations(drawn),
            mirostat=tuple(row for row, state in drawn if state.sampling.mirostat is not None),
        )

    def plan_early_sampling(
        self, samples: Sequence[SampleRows], slots: Sequence[int], positions: IntArray, num_pending: int = 0
    ) -> EarlySamplingPlan:
        """How a kernel can sample the tokens of choices that need only the model's plain choice or a draw.

        Their grammars, if any, are ignored.

        Args:
            samples: the choices that are ready to sample.
            slots: slots of the same choices.
            positions: [R] sequence position of the token at each row of the step's logits.
            num_pending: output tokens of each choice that are not committed yet.
        """
        states = [self._slot(slot) for slot in slots]
        served = [
            (sample, state) for sample, state in zip(samples, states, strict=True) if _can_be_picked(sample, state)
        ]
        plan = EarlySamplingPlan.greedy(len(positions))
        drawn = [(sample, state) for sample, state in served if state.sampling.temperature > 0]
        if drawn:
            first = np.array([sample.first for sample, _ in drawn])
            counts = np.array([1 + len(sample.tree) for sample, _ in drawn])
            rows = np.arange(counts.sum()) + (first - counts.cumsum() + counts).repeat(counts)
            num_output = [state.num_output + num_pending for _, state in drawn]
            before = positions[first] - num_output  # tokens before the output
            noise = np.array([state.noise for _, state in drawn], dtype=np.uint64)
            plan.keys[rows] = noise_keys(noise.repeat(counts), positions[rows] - before.repeat(counts))
            plan.temperatures[rows] = np.repeat([state.sampling.temperature for _, state in drawn], counts)
        with_grammar = frozenset(sample.choice for sample, state in served if state.matcher is not None)
        return replace(plan, choices=frozenset(sample.choice for sample, _ in served), with_grammar=with_grammar)

    def _slot(self, slot: int) -> SlotState:
        state = self._slots[slot]
        if state is None:
            raise KeyError(f"slot {slot} is free")
        return state

    def _row_numbers(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, device=self._device) if rows else self._no_entries.rows

    def _masks(self, matchers: "Sequence[Matcher]") -> Tensor:
        """[matchers, vocab] bool: tokens that each allows next."""
        if not matchers:
            return self._no_masks
        words = np.stack([matcher.mask() for matcher in matchers])
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_)).to(self._device)

    def _entries(self, of_rows: Sequence[tuple[int, TokenValues | None]]) -> Entries:
        used = [(row, *entries) for row, entries in of_rows if entries is not None]
        if not used:
            return self._no_entries
        rows = np.repeat([row for row, _, _ in used], [len(tokens) for _, tokens, _ in used])
        tokens = np.concatenate([tokens for _, tokens, _ in used])
        values = np.concatenate([values for _, _, values in used])
        return Entries(*(torch.from_numpy(column).to(self._device) for column in (rows, tokens, values)))

    def _truncations(self, drawn: Sequence[tuple[int, SlotState]]) -> tuple[Setting, ...]:
        """The settings grouped by order, because rows with different orders have no step in common."""
        of_orders: dict[tuple[str, ...], list[tuple[int, Mapping[str, float]]]] = {}
        for row, state in drawn:
            if state.settings:
                of_orders.setdefault(state.sampling.sampler_order, []).append((row, state.settings_of_next()))
        settings = (self._setting(name, of_rows) for order, of_rows in of_orders.items() for name in order)
        return tuple(used for used in settings if used is not None)

    def _setting(self, name: str, of_rows: Sequence[tuple[int, Mapping[str, float]]]) -> Setting | None:
        used = [(row, settings[name]) for row, settings in of_rows if name in settings]
        if not used:
            return None
        rows = torch.tensor([row for row, _ in used], dtype=torch.int64, device=self._device)
        values = torch.tensor([[value] for _, value in used], dtype=torch.float64, device=self._device)
        return Setting(name, rows, values)


def _can_be_picked(sample: SampleRows, state: SlotState) -> bool:
    """Verification modes other than "match" differ only above temperature 0."""
    return state.is_bare and (sample.verify == "match" or state.sampling.temperature == 0)


def _check_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    breakers = sampling.dry.breakers if sampling.dry is not None else ()
    fields = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words": list(chain.from_iterable(sampling.bad_words)),
        "stop_token_ids": sampling.stop_token_ids,
        "dry": list(chain.from_iterable(breaker.first + breaker.rest for breaker in breakers)),
    }
    for name, tokens in fields.items():
        for token in (min(tokens), max(tokens)) if tokens else ():  # the extremes suffice
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name}: token id {token} is not in the vocabulary of {vocab_size} tokens")
    if () in sampling.bad_words:
        raise ValueError("bad_words: a word has no tokens")
