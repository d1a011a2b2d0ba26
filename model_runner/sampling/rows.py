"""What the sampler knows: a slot for each running request, and rows gathered from slots for each step.

A row is a row of logits, not a request: a slot may have any number of rows in a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.contract import SamplingParams
from model_runner.sampling.history import BadWords, NgramTable, TokenCounts
from model_runner.sampling.noise import Stream, noise_key

TokenValues = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Token ids, and a value for each."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Values for single entries of the logits; where an entry stands twice, it has the same value. May be empty."""

    rows: Tensor  # [n] int64
    tokens: Tensor  # [n] int64
    values: Tensor  # [n] float64

    def __bool__(self) -> bool:
        return len(self.rows) > 0


@dataclass(frozen=True, slots=True)
class Setting:
    """A number for each row that uses a setting. May be empty."""

    rows: Tensor  # [n] int64
    values: Tensor  # [n, 1] float64

    def __bool__(self) -> bool:
        return len(self.rows) > 0

    def take(self, logits: Tensor) -> Tensor:
        """The rows that use the setting, [n, vocab]; not a copy if all do."""
        return logits if len(self.rows) == len(logits) else logits.index_select(0, self.rows)

    def put(self, logits: Tensor, changed: Tensor) -> Tensor:
        """The logits with these rows in their places; may write to them."""
        return changed if len(self.rows) == len(logits) else logits.index_copy_(0, self.rows, changed)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """All that the processors and the sampler read about the rows of one step.

    Greedy rows appear in no Setting but `least_share`.
    """

    sampling: tuple[SamplingParams, ...]
    """For each row."""
    positions: tuple[int, ...]
    """For each row, how many tokens were generated before."""
    is_plain: bool
    """Whether in all rows the highest of the model's logits is the token, and nobody asks for logprobs."""
    greedy: tuple[int, ...]
    """Rows at temperature 0."""
    whole: tuple[int, ...]
    """Rows that sample from the whole vocabulary, or nearly so."""
    truncated: tuple[int, ...]
    """Rows that sample from what a truncation or a list of allowed tokens leaves."""
    logit_bias: Entries
    allowed_rows: Tensor  # [n] int64: rows that have a list of allowed tokens
    allowed: Entries  # the lists; the values mean nothing
    banned: Entries  # values are -inf
    repetition: Entries  # values are the penalty
    output_penalty: Entries  # values are what to subtract
    least_share: Setting
    temperature: Setting
    typical_p: Setting
    top_k: Setting
    top_p: Setting
    min_p: Setting
    stream: Stream = Stream.TARGET
    """Of the noise that tokens are drawn with."""

    def key(self, row: int, stream: Stream | None = None) -> int:
        """The key of a row's noise; of `self.stream` if no other is named."""
        sampling = self.sampling[row]
        return noise_key(sampling.seed, sampling.choice, self.stream if stream is None else stream, self.positions[row])

    def without_whole_temperature(self) -> "SamplingRows":
        """The same, but the rows in `whole` are not in `temperature`."""
        used = self.temperature
        if not (used and self.whole):
            return self
        others = set(self.truncated)
        left = [place for place, row in enumerate(used.rows.tolist()) if row in others]
        return replace(self, temperature=Setting(used.rows[left], used.values[left]))


class _Slot:
    """One running request: its settings and its history."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        self.sampling = sampling
        self.settings = _settings_in_use(sampling, vocab_size)
        self.truncates = sampling.allowed_token_ids is not None or bool(self.settings.keys() - {"temperature"})
        self.constrains = _constrains(sampling)
        is_reported = sampling.logprobs is not None
        self.is_plain = not (sampling.temperature or self.settings or self.constrains or is_reported)
        self.logit_bias = _summed(sampling.logit_bias)
        self.allowed = _constant(sampling.allowed_token_ids or (), 0.0)
        self.num_output = 0
        self._history = list(prompt)
        self._bad_words = BadWords(sampling.bad_words)
        self._repetition: TokenCounts | None = TokenCounts(prompt) if sampling.repetition_penalty != 1 else None
        penalised = sampling.frequency_penalty or sampling.presence_penalty
        self._output: TokenCounts | None = TokenCounts(()) if penalised else None
        self._ngrams: NgramTable | None = None
        if sampling.no_repeat_ngram_size:
            self._ngrams = NgramTable(sampling.no_repeat_ngram_size)
            for token in prompt:
                self._ngrams.add(token)

    def commit(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._history.append(token)
            self.num_output += 1
            for table in (self._repetition, self._output, self._ngrams):
                if table is not None:
                    table.add(token)

    def banned(self) -> TokenValues | None:
        """What must not come next, with -inf; a token may repeat."""
        banned = self._bad_words.blocked(self._history)
        if self.num_output < self.sampling.min_tokens:
            banned += self.sampling.stop_token_ids
        if self._ngrams is not None:
            banned += self._ngrams.blocked()
        return _constant(banned, -np.inf)

    def repetition_penalty(self) -> TokenValues | None:
        """The penalty of each token in prompt or output."""
        if self._repetition is None:
            return None
        return _constant(self._repetition.tokens, self.sampling.repetition_penalty)

    def output_penalty(self) -> TokenValues | None:
        """What frequency and presence penalty subtract from the logit of each token in the output."""
        if self._output is None:
            return None
        counts = np.array(self._output.counts, dtype=np.float64)
        amounts = counts * self.sampling.frequency_penalty + self.sampling.presence_penalty
        return np.array(self._output.tokens), amounts


class SamplingState:
    """The slots. Token ids in the settings are checked against the vocabulary; ranges of numbers are the caller's."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._slots: list[_Slot | None] = [None] * max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._no_entries = Entries(none, none, none.double())
        self._no_setting = Setting(none, none.double().unsqueeze(1))

    def admit(self, slot: int, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        """Fill a free slot. With `output` the request goes on as if these tokens had been committed one by one.

        Raises ValueError if the slot is taken or if the settings hold an empty bad word or a token id that is not in
        the vocabulary; the message names the field.
        """
        if self._slots[slot] is not None:
            raise ValueError(f"slot {slot} is taken")
        _check_tokens(sampling, self._vocab_size)
        state = _Slot(sampling, prompt, self._vocab_size)
        state.commit(output)
        self._slots[slot] = state

    def commit(self, slot: int, tokens: Sequence[int]) -> None:
        """Append generated tokens to the slot's history."""
        self._slot(slot).commit(tokens)

    def release(self, slot: int) -> None:
        """Free the slot and forget its request."""
        self._slots[slot] = None

    def rows(self, slots: Sequence[int]) -> SamplingRows:
        """What the next token of each of these slots is sampled with. A slot may stand there more than once."""
        states = [self._slot(slot) for slot in slots]
        drawn = [(row, state) for row, state in enumerate(states) if state.sampling.temperature > 0]
        tuned = [(row, state) for row, state in enumerate(states) if state.settings]
        constrained = [(row, state) for row, state in enumerate(states) if state.constrains]
        restricted = [row for row, state in constrained if state.sampling.allowed_token_ids is not None]
        return SamplingRows(
            sampling=tuple(state.sampling for state in states),
            positions=tuple(state.num_output for state in states),
            is_plain=all(state.is_plain for state in states),
            greedy=tuple(row for row, state in enumerate(states) if state.sampling.temperature == 0),
            whole=tuple(row for row, state in drawn if not state.truncates),
            truncated=tuple(row for row, state in drawn if state.truncates),
            logit_bias=self._entries([(row, state.logit_bias) for row, state in constrained]),
            allowed_rows=torch.tensor(restricted, device=self._device) if restricted else self._no_entries.rows,
            allowed=self._entries([(row, state.allowed) for row, state in constrained]),
            banned=self._entries([(row, state.banned()) for row, state in constrained]),
            repetition=self._entries([(row, state.repetition_penalty()) for row, state in constrained]),
            output_penalty=self._entries([(row, state.output_penalty()) for row, state in constrained]),
            least_share=self._setting("least_share", tuned),
            temperature=self._setting("temperature", tuned),
            typical_p=self._setting("typical_p", tuned),
            top_k=self._setting("top_k", tuned),
            top_p=self._setting("top_p", tuned),
            min_p=self._setting("min_p", tuned),
        )

    def _slot(self, slot: int) -> _Slot:
        state = self._slots[slot]
        if state is None:
            raise KeyError(f"slot {slot} is free")
        return state

    def _entries(self, of_rows: Sequence[tuple[int, TokenValues | None]]) -> Entries:
        used = [(row, *entries) for row, entries in of_rows if entries is not None]
        if not used:
            return self._no_entries
        rows = np.repeat([row for row, _, _ in used], [len(tokens) for _, tokens, _ in used])
        tokens = np.concatenate([tokens for _, tokens, _ in used])
        values = np.concatenate([values for _, _, values in used])
        return Entries(*(torch.from_numpy(column).to(self._device) for column in (rows, tokens, values)))

    def _setting(self, name: str, tuned: Sequence[tuple[int, _Slot]]) -> Setting:
        used = [(row, state.settings[name]) for row, state in tuned if name in state.settings]
        if not used:
            return self._no_setting
        rows = torch.tensor([row for row, _ in used], dtype=torch.int64, device=self._device)
        values = torch.tensor([[value] for _, value in used], dtype=torch.float64, device=self._device)
        return Setting(rows, values)


def _settings_in_use(sampling: SamplingParams, vocab_size: int) -> dict[str, float]:
    """The settings that leave fewer tokens or change how they are drawn, as far as they change anything."""
    settings = {"least_share": sampling.least_share} if sampling.least_share else {}
    if sampling.temperature == 0:
        return settings
    if sampling.temperature != 1:
        settings["temperature"] = sampling.temperature
    if sampling.typical_p < 1:
        settings["typical_p"] = sampling.typical_p
    if 0 < sampling.top_k < vocab_size:
        settings["top_k"] = sampling.top_k
    if sampling.top_p < 1:
        settings["top_p"] = sampling.top_p
    if sampling.min_p > 0:
        settings["min_p"] = sampling.min_p
    return settings


def _constrains(sampling: SamplingParams) -> bool:
    """Whether the settings that rule tokens out or penalise them change anything."""
    return bool(
        sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or sampling.bad_words
        or (sampling.min_tokens and sampling.stop_token_ids)
        or sampling.no_repeat_ngram_size
        or sampling.repetition_penalty != 1
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )


def _check_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    fields = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_words": [token for word in sampling.bad_words for token in word],
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, tokens in fields.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name}: token id {token} is not in the vocabulary of {vocab_size}")
    if () in sampling.bad_words:
        raise ValueError("bad_words: a word has no tokens")


def _constant(tokens: Sequence[int], value: float) -> TokenValues | None:
    return (np.array(tokens, dtype=np.int64), np.full(len(tokens), value)) if tokens else None


def _summed(pairs: Iterable[tuple[int, float]]) -> TokenValues | None:
    """Values of the same token added up."""
    sums: dict[int, float] = {}
    for token, value in pairs:
        sums[token] = sums.get(token, 0.0) + value
    return (np.array(list(sums), dtype=np.int64), np.array(list(sums.values()))) if sums else None
