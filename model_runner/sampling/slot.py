"""The sampler's state of one running request: its settings and its history."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from model_runner.contract import SamplingParams
from model_runner.sampling.history import BadWords, RepeatedNgrams, Repetitions, SeenTokens, Table, TokenCounts
from model_runner.sampling.noise import Stream, noise_key, noise_state, uniform
from model_runner.sampling.thinking import ThinkingBudget

if TYPE_CHECKING:
    from model_runner.sampling.grammar import Matcher

TokenValues = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Token ids and a value for each."""
TableT = TypeVar("TableT", bound=Table)
_MOST = 1e30
"""Upper limit of powers, so that logits stay finite."""


class SlotState:
    """Sampling settings and token history of a request."""

    def __init__(
        self,
        sampling: SamplingParams,
        vocab_size: int,
        prompt: Iterable[int],
        output: Sequence[int] = (),
        thinking: ThinkingBudget | None = None,
    ) -> None:
        """`thinking` must have seen `output`."""
        self.sampling = sampling
        self.matcher: Matcher | None = None
        """Matcher of the settings' grammar, if any. It has seen the output."""
        self.settings = _settings_in_use(sampling, vocab_size)
        self.truncates = bool(
            sampling.allowed_token_ids is not None
            or sampling.thinking is not None
            or self.settings.keys() - {"temperature"}
            or sampling.least_share
        )
        self.constrains = sampling.grammar is not None or _has_other_constraints(sampling)
        self.mu = self._first_mu = 2 * sampling.mirostat.tau if sampling.mirostat is not None else None
        """Mirostat's limit on the surprise of the next token, in bits."""
        self.is_listed = sampling.beam_candidates > 0
        is_simple = not (self.truncates or sampling.logprobs is not None or self.is_listed)
        self.takes_highest = is_simple and not self.constrains and sampling.temperature == 0
        self.is_bare = is_simple and not (_has_other_constraints(sampling) or sampling.needs_scoring)
        """Whether only logits, temperature, noise and perhaps a grammar decide its tokens, and only tokens are
        requested."""
        self.noise = noise_state(sampling.seed, sampling.choice, Stream.TARGET)
        """The part of the noise key that all positions share."""
        self.logit_bias = _summed(sampling.logit_bias)
        self._allowed = None if sampling.allowed_token_ids is None else _values(sampling.allowed_token_ids, 0.0)
        self._thinking = thinking
        self.num_output = self._num_first = len(output)
        size, dry = sampling.no_repeat_ngram_size, sampling.dry
        is_asked = sampling.bad_words or sampling.repetition_penalty != 1 or size or dry is not None
        history = [*prompt, *output] if is_asked else []
        self._history = history if sampling.bad_words else []
        """Prompt and output, if bad_words are set; otherwise empty."""
        self._bad_words = BadWords(sampling.bad_words)
        self._seen = SeenTokens(history) if sampling.repetition_penalty != 1 else None
        penalised = sampling.frequency_penalty or sampling.presence_penalty
        self._output = TokenCounts(output) if penalised else None
        self._ngrams = RepeatedNgrams(history, size) if size else None
        self._repetitions = Repetitions(history, dry.last_n, dry.breakers) if dry is not None else None

    def fork(self, sampling: SamplingParams, num_output: int) -> Self | None:
        """Another choice with the same prompt and the same beginning of the output, made without reprocessing tokens.

        It has no grammar matcher, and mirostat starts from its initial limit.

        Args:
            sampling: differs from this choice's only in `choice` and `prompt_logprobs`.
            num_output: length of the common beginning of the output.

        Returns:
            None if the state at that point is no longer known. It is known at the current end of the output, and at its
            start if this choice began without output.
        """
        from_start = num_output != self.num_output
        if from_start and not num_output == self._num_first == 0:
            return None
        fork = copy(self)
        fork.sampling, fork.matcher, fork.mu = sampling, None, self._first_mu
        fork.noise = noise_state(sampling.seed, sampling.choice, Stream.TARGET)
        fork._history = self._history[: len(self._history) - self.num_output + num_output]
        fork.num_output = num_output
        fork._thinking = _forked(self._thinking, from_start=from_start)
        fork._seen = _forked(self._seen, from_start=from_start)
        fork._output = _forked(self._output, from_start=from_start)
        fork._ngrams = _forked(self._ngrams, from_start=from_start)
        fork._repetitions = _forked(self._repetitions, from_start=from_start)
        return fork

    def commit(self, token: int, surprise: float | None = None) -> None:
        """Record a generated token; `surprise` is -log2 of its probability among the tokens that mirostat kept."""
        self._history.append(token)
        self.num_output += 1
        if self.matcher is not None:
            self.matcher.advance(token)
        for table in (self._thinking, self._seen, self._output, self._ngrams, self._repetitions):
            if table is not None:
                table.add(token)
        mirostat = self.sampling.mirostat
        if mirostat is not None and self.mu is not None and surprise is not None:
            self.mu -= mirostat.eta * (surprise - mirostat.tau)

    def settings_of_next(self) -> Mapping[str, float]:
        """The truncation settings for the next token."""
        sampling = self.sampling
        if sampling.xtc is None and self.mu is None:
            return self.settings
        settings = dict(self.settings)
        if sampling.xtc is not None:
            key = noise_key(sampling.seed, sampling.choice, Stream.XTC, self.num_output)
            if uniform(key, 0) >= sampling.xtc.probability:
                del settings["xtc"]
        if self.mu is not None:
            settings["mirostat"] = self.mu
        return settings

    def allowed(self) -> TokenValues | None:
        """The only tokens that may come next, or None if all may. The values are meaningless."""
        forced = None if self._thinking is None else self._thinking.forced
        if forced is None or (self.matcher is not None and not _is_in(self.matcher.mask(), forced)):
            return self._allowed  # a grammar may ban the tag within a character: then it is forced afterwards
        return _values((forced,), 0.0)

    def banned(self) -> TokenValues | None:
        """Tokens that must not come next, each with -inf. Tokens may repeat."""
        if self.matcher is not None and self.matcher.is_stopped:
            return None
        banned = self._bad_words.blocked(self._history)
        if self.num_output < self.sampling.min_tokens:
            banned += self.sampling.stop_token_ids
        if self._ngrams is not None:
            banned += self._ngrams.blocked()
        return _constant(banned, -np.inf)

    def repetition_penalty(self) -> TokenValues | None:
        """The repetition penalty of each token in prompt or output."""
        if self._seen is None:
            return None
        return _constant(self._seen.tokens, self.sampling.repetition_penalty)

    def output_penalty(self) -> TokenValues | None:
        """The amounts that frequency and presence penalty subtract from the logits of output tokens."""
        if self._output is None:
            return None
        counts = np.array(self._output.counts, dtype=np.float64)
        amounts = counts * self.sampling.frequency_penalty + self.sampling.presence_penalty
        return np.array(self._output.tokens), amounts

    def dry_penalty(self) -> TokenValues | None:
        """The amounts that DRY subtracts from the logits of tokens that would extend a repetition."""
        dry = self.sampling.dry
        if dry is None or self._repetitions is None:
            return None
        tokens, lengths = self._repetitions.prolonged(dry.allowed_length)
        return tokens, np.minimum(dry.multiplier * _power(dry.base, lengths - dry.allowed_length), _MOST)

    def end_token_growth(self) -> TokenValues | None:
        """Relative increase of the logit of each token that ends the output (exponential_decay_length_penalty)."""
        penalty = self.sampling.exponential_decay_length_penalty
        if penalty is None or self.num_output <= penalty[0]:
            return None
        start, factor = penalty
        return _constant(self.sampling.stop_token_ids, float(_power(factor, self.num_output - start)) - 1)


def _forked(table: TableT | None, *, from_start: bool) -> TableT | None:
    return None if table is None else table.fork(from_start=from_start)


def _settings_in_use(sampling: SamplingParams, vocab_size: int) -> dict[str, float]:
    """Settings that act after the greedy decision, without those that change nothing."""
    if sampling.temperature == 0:
        return {}
    xtc, mirostat = sampling.xtc, sampling.mirostat
    settings = {
        "temperature": (sampling.temperature, sampling.temperature != 1),
        "top_n_sigma": (sampling.top_n_sigma, sampling.top_n_sigma > 0),
        "typical_p": (sampling.typical_p, sampling.typical_p < 1),
        "epsilon_cutoff": (sampling.epsilon_cutoff, sampling.epsilon_cutoff > 0),
        "eta_cutoff": (sampling.eta_cutoff, sampling.eta_cutoff > 0),
        "top_k": (sampling.top_k, 0 < sampling.top_k < vocab_size),
        "top_p": (sampling.top_p, sampling.top_p < 1),
        "min_p": (sampling.min_p, sampling.min_p > 0),
        "xtc": (xtc.threshold if xtc else 0.0, xtc is not None),
        "mirostat": (2 * mirostat.tau if mirostat else 0.0, mirostat is not None),
    }
    return {name: value for name, (value, is_used) in settings.items() if is_used}


def _has_other_constraints(sampling: SamplingParams) -> bool:
    """Whether any setting before the greedy decision changes the logits, not counting the grammar."""
    return bool(
        sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or sampling.thinking is not None
        or sampling.bad_words
        or (sampling.min_tokens and sampling.stop_token_ids)
        or sampling.no_repeat_ngram_size
        or sampling.repetition_penalty != 1
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.dry is not None
        or sampling.exponential_decay_length_penalty is not None
    )


def _power(base: float, exponents: NDArray[np.int64] | int) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return np.minimum(np.power(np.float64(base), exponents), _MOST)


def _constant(tokens: Sequence[int], value: float) -> TokenValues | None:
    return _values(tokens, value) if tokens else None


def _values(tokens: Sequence[int], value: float) -> TokenValues:
    return np.array(tokens, dtype=np.int64), np.full(len(tokens), value)


def _summed(pairs: Iterable[tuple[int, float]]) -> TokenValues | None:
    """Values summed by token."""
    sums: dict[int, float] = {}
    for token, value in pairs:
        sums[token] = sums.get(token, 0.0) + value
    return (np.array(list(sums), dtype=np.int64), np.array(list(sums.values()))) if sums else None


def _is_in(mask: NDArray[np.int32], token: int) -> bool:
    """Whether the token's bit is set in the mask."""
    return bool(mask[token // 32] >> (token % 32) & 1)
