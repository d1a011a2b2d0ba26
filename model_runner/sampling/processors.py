"""From the model's logits to those that are sampled from, for all rows of a step at once.

The order is data: CONSTRAINTS, then greedy rows are decided, then TRUNCATIONS. Truncations compute in float64, so that
which tokens they keep does not hang on rounding, and always keep at least one token.
"""

import math
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from model_runner.sampling.rows import Entries, SamplingRows, Setting

_SHORT_TAIL = 4096
"""So many of the less probable tokens usually hold all of the mass that the less probable ones have together."""


class LogitsProcessor(Protocol):
    """One step from raw to final logits. A row that does not use it keeps its bits."""

    def applies(self, rows: SamplingRows) -> bool:
        """Whether any row uses it; if not, it is skipped."""
        ...

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Process logits [rows, vocab], float32. May write to its argument."""
        ...


class LogitBias:
    """Adds the request's own bias."""

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.logit_bias)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return _add(logits, rows.logit_bias)


class AllowedTokens:
    """Blocks all but a list of tokens."""

    def applies(self, rows: SamplingRows) -> bool:
        return len(rows.allowed_rows) > 0

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        places = rows.allowed.rows, rows.allowed.tokens
        kept = logits[places]
        logits[rows.allowed_rows] = -math.inf
        logits[places] = kept
        return logits


class BannedTokens:
    """Blocks what bad_words, min_tokens and no_repeat_ngram_size forbid."""

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
    """Frequency and presence penalty: OpenAI's definition, over generated tokens only."""

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.output_penalty)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        penalty = rows.output_penalty
        return _add(logits, Entries(penalty.rows, penalty.tokens, -penalty.values))


class Temperature:
    """Divides the logits, after shifting the highest to 0: then nothing overflows, however small the temperature."""

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.temperature)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        used = rows.temperature
        old = used.take(logits).double()
        return used.put(logits, old.sub_(old.amax(-1, keepdim=True)).div_(used.values).float())


class TypicalP:
    """Locally typical sampling (arXiv:2202.00666).

    Tokens are ordered by |-log p - H|, H the entropy; the shortest head with mass >= typical_p stays, and all that
    tie with its last.
    """

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.typical_p)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        used = rows.typical_p
        old = used.take(logits)
        logprobs = torch.log_softmax(old.double(), -1)  # [n, vocab]
        probs = logprobs.exp()
        # Not sum: given a single long row, it splits the row among threads and rounds differently than in a batch.
        entropy = torch.special.entr(probs).cumsum(-1)[:, -1:]
        distance = (-logprobs - entropy).abs()
        # Tokens with the mass typical_p at least have a logprob above `tail`, hence a distance up to `reach`: only
        # these need to be sorted.
        tail = _tail_probability(used.values, probs.shape[-1]).log()
        reach = torch.maximum(-tail - entropy, entropy)
        tokens, real = compact(distance <= reach)
        near, order = distance.gather(1, tokens).masked_fill(~real, math.inf).sort(dim=-1, stable=True)
        mass = probs.gather(1, tokens).masked_fill(~real, 0).gather(1, order).cumsum(-1)
        last = (mass < used.values).sum(-1, keepdim=True).minimum(real.sum(-1, keepdim=True) - 1)
        return used.put(logits, torch.where(distance > near.gather(1, last), -math.inf, old))


class TopK:
    """Keeps the k highest logits and all that tie with the last of them."""

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.top_k)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        used = rows.top_k
        k = used.values.long()  # [n, 1]
        old = used.take(logits)
        lowest = old.topk(int(k.max()), -1).values.gather(1, k - 1)
        return used.put(logits, torch.where(old < lowest, -math.inf, old))


class TopP:
    """Nucleus sampling (arXiv:1904.09751).

    Keeps a token if the more probable ones have less mass than top_p together; among equals the lower id counts as
    more probable. The probabilities are those after top_k.
    """

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.top_p)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        used = rows.top_p
        old = used.take(logits)
        tokens, probs = _head(torch.softmax(old.double(), -1), used.values)
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(1, order)
        kept = (probs.cumsum(-1)[:, :-1] < used.values) & (probs[:, 1:] > 0)
        first, others = tokens[:, :1], tokens[:, 1:]
        tokens = torch.cat([first, others.where(kept, first)], -1)  # the first always stays, and may be named twice
        return used.put(logits, torch.full_like(old, -math.inf).scatter_(1, tokens, old.gather(1, tokens)))


class MinP:
    """Keeps tokens with at least the share min_p of the highest probability (arXiv:2407.01082)."""

    def applies(self, rows: SamplingRows) -> bool:
        return bool(rows.min_p)

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        used = rows.min_p
        old = used.take(logits)
        lowest = old.amax(-1, keepdim=True).double() + used.values.log()
        return used.put(logits, torch.where(old < lowest, -math.inf, old))


CONSTRAINTS: Final[tuple[LogitsProcessor, ...]] = (
    LogitBias(),
    AllowedTokens(),
    BannedTokens(),
    RepetitionPenalty(),  # before the penalties on output, which may change a logit's sign
    OutputPenalties(),
)
TRUNCATIONS: Final[tuple[LogitsProcessor, ...]] = (
    Temperature(),
    TypicalP(),
    TopK(),
    TopP(),  # on what top_k leaves, renormalised
    MinP(),
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
    """The scores, with -inf for tokens whose probability by the logits is less than the row's share of the highest.

    That is the adaptive plausibility constraint of contrastive decoding (arXiv:2210.15097). Tokens that other settings
    have ruled out do not count, so at least one of the others is always left.
    """
    old = least_share.take(scores)
    possible = least_share.take(logits).masked_fill(old == -math.inf, -math.inf)
    lowest = possible.amax(-1, keepdim=True).double() + least_share.values.log()
    return least_share.put(scores.clone(), old.masked_fill(possible < lowest, -math.inf))


def compact(kept: Tensor) -> tuple[Tensor, Tensor]:
    """The columns that each row of a mask keeps, in ascending order, [rows, width]; and which of them are real.

    The width is what the fullest row needs; the others are filled up with column 0.
    """
    row, column = _places(kept)
    if len(kept) == 1:
        return column.unsqueeze(0), torch.ones(1, len(column), dtype=torch.bool, device=kept.device)
    counts = row.bincount(minlength=len(kept))
    place = torch.arange(len(row), device=kept.device) - (counts.cumsum(0) - counts)[row]
    columns = torch.zeros(len(kept), int(counts.max()), dtype=torch.int64, device=kept.device)
    columns[row, place] = column
    return columns, torch.arange(columns.shape[1], device=kept.device) < counts.unsqueeze(1)


def _places(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The rows and columns that a mask holds, row by row: as its nonzero, for which numpy takes a fifth of the time."""
    if mask.device.type != "cpu":
        row, column = mask.nonzero(as_tuple=True)
        return row, column
    row_of, column_of = np.divmod(np.flatnonzero(mask.numpy()), mask.shape[1])
    return torch.from_numpy(row_of), torch.from_numpy(column_of)


def _head(probs: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable tokens of each row, in ascending order, [n, width], and their probabilities.

    They have the mass [n, 1] and half of the rest: what is summed up over them needs no others, whatever the rounding.
    Places that a row does not need have probability 0.
    """
    for num_tail in (_SHORT_TAIL, probs.shape[-1]):  # most rows need no more than the first
        tokens, real = compact(probs >= _tail_probability(mass, num_tail))
        head = probs.gather(1, tokens).masked_fill(~real, 0)
        if (head.sum(-1, keepdim=True) >= (1 + mass) / 2).all():
            break
    return tokens, head


def _add(logits: Tensor, entries: Entries) -> Tensor:
    places = entries.rows, entries.tokens
    logits[places] = (logits[places].double() + entries.values).float()
    return logits


def _tail_probability(mass: Tensor, num_tokens: int) -> Tensor:
    """So low that as many tokens below it have at most half of 1 - mass together."""
    return (1 - mass) / (2 * num_tokens)
