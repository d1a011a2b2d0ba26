"""Logits processors: bias, bans and penalties, applied to all rows of a step at once.

The order is data: CONSTRAINTS first, then greedy rows are decided, then sampled rows continue in truncations.py.
"""

import math
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from model_runner.sampling.rows import Entries, SamplingRows, Setting

_LARGEST = torch.finfo(torch.float32).max


class LogitsProcessor(Protocol):
    """One step between the raw logits and the greedy choice. Rows that do not use it keep their exact bits."""

    def applies(self, rows: SamplingRows) -> bool:
        """Whether any row uses it. Otherwise it is skipped."""
        ...

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Process logits [rows, vocab] float32. May modify its argument."""
        ...


class LogitBias:
    """Adds the request's logit_bias."""

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.logit_bias)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return _add(logits, rows.logit_bias)


class AllowedTokens:
    """Bans all tokens that are not in the request's list."""

    def applies(self, rows: SamplingRows) -> bool:
        return len(rows.allowed_rows) > 0

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        places = rows.allowed.rows, rows.allowed.tokens
        kept = logits[places]
        logits[rows.allowed_rows] = -math.inf
        logits[places] = kept
        return logits


class Grammar:
    """Bans tokens that the grammar does not allow."""

    def applies(self, rows: SamplingRows) -> bool:
        return len(rows.grammar_rows) > 0

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        if len(rows.grammar_rows) == len(logits):
            return logits.masked_fill_(~rows.masks, -math.inf)
        kept = logits.index_select(0, rows.grammar_rows).masked_fill_(~rows.masks, -math.inf)
        return logits.index_copy_(0, rows.grammar_rows, kept)


class BannedTokens:
    """Bans the tokens that bad_words, min_tokens and no_repeat_ngram_size forbid."""

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.banned)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return _add(logits, rows.banned)


class RepetitionPenalty:
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv:1909.05858)."""

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.repetition)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        places, penalty = (rows.repetition.rows, rows.repetition.tokens), rows.repetition.values
        old = logits[places].double()
        logits[places] = torch.where(old > 0, old / penalty, old * penalty).float()
        return logits


class OutputPenalties:
    """Frequency and presence penalty as OpenAI defines them: only generated tokens count."""

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.output_penalty)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        penalty = rows.output_penalty
        return _add(logits, Entries(penalty.rows, penalty.tokens, -penalty.values))


class DryPenalty:
    """DRY ("don't repeat yourself"): penalises tokens that would extend a repetition, more for longer repetitions."""

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.dry)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return _add(logits, Entries(rows.dry.rows, rows.dry.tokens, -rows.dry.values))


class LengthPenalty:
    """Raises the logits of tokens that end the output as it grows longer. Banned tokens stay banned."""

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.ending)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        places = rows.ending.rows, rows.ending.tokens
        old = logits[places].double()
        new = (old + old.abs() * rows.ending.values).clamp(-_LARGEST, _LARGEST)  # DRY may have made `old` huge
        logits[places] = torch.where(old.isfinite(), new, old).float()
        return logits


CONSTRAINTS: Final[tuple[LogitsProcessor, ...]] = (
    LogitBias(),
    AllowedTokens(),
    Grammar(),
    BannedTokens(),
    RepetitionPenalty(),  # before the output penalties, which may change a logit's sign
    OutputPenalties(),
    DryPenalty(),
    LengthPenalty(),
)


def process(processors: Sequence[LogitsProcessor], logits: Tensor, rows: SamplingRows) -> Tensor:
    """The processed logits: a copy, or the argument itself if no processor applies."""
    used = [processor for processor in processors if processor.applies(rows)]
    if used:
        logits = logits.clone()
    for processor in used:
        logits = processor(logits, rows)
    return logits


def keep_plausible(scores: Tensor, logits: Tensor, least_share: Setting) -> Tensor:
    """Scores with -inf for tokens whose probability by `logits` is below the row's share of the highest probability.

    This is the adaptive plausibility constraint of contrastive decoding (arXiv:2210.15097). Tokens that are already
    banned do not count, so at least one other token always remains.
    """
    old = least_share.take(scores)
    possible = least_share.take(logits).masked_fill(old == -math.inf, -math.inf)
    lowest = possible.amax(-1, keepdim=True).double() + least_share.values.log()
    return least_share.put(scores.clone(), old.masked_fill(possible < lowest, -math.inf))


def _add(logits: Tensor, entries: Entries) -> Tensor:
    places = entries.rows, entries.tokens
    logits[places] = (logits[places].double() + entries.values).float()
    return logits
