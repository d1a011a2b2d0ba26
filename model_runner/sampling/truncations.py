"""Truncations: from constrained logits to the logits that are sampled from, for all rows of a step at once.

All steps compute in float64, so that rounding hardly affects which tokens they keep, and always keep at least one. Each
step sees the result of the previous one, and its probabilities are the softmax of that.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from model_runner.contract import SAMPLER_ORDER
from model_runner.kernels.library import Kernels
from model_runner.kernels.row_sums import cumulative_sums, entropies, row_log_softmax, row_softmax, row_sums
from model_runner.sampling.rows import SamplingRows, Setting

_KINDS: Final = {name: kind for kind, name in enumerate(SAMPLER_ORDER)}
"""Values of SwTruncationKind in kernels/cpu/samewise.h."""


class NativeTruncations:
    """All truncations on the CPU, with the kernels of kernels/cpu/truncate.h.

    Keeps the same tokens as `truncate`, unless a bound is met to the last bits of a double: the order of sums differs.
    A server uses one of the two for all requests.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """The logits [rows, vocab] to sample from: a copy, or the argument itself if nothing changes."""
        if not rows.truncations:
            return logits
        steps: list[list[tuple[int, float]]] = [[] for _ in range(len(logits))]
        for used in rows.truncations:
            kind = _KINDS[used.name]
            for row, value in zip(used.rows.tolist(), used.values.flatten().tolist(), strict=True):
                steps[row].append((kind, value))
        return self._kernels.truncate(logits.contiguous(), steps)


_SHORT_TAIL = 4096
"""Number of tail tokens that usually hold all of the tail's mass."""


Truncation = Callable[[Tensor, Setting], Tensor]
"""One truncation step: processes the rows of a setting in logits [rows, vocab] float32. Other rows keep their exact
bits. It may modify its argument."""


class Temperature:
    """Divides the logits after shifting the highest to 0, so that small temperatures do not overflow."""

    def __call__(self, logits: Tensor, used: Setting) -> Tensor:
        old = used.take(logits).double()
        return used.put(logits, old.sub_(old.amax(-1, keepdim=True)).div_(used.values).float())


class TopNSigma:
    """Keeps logits at most n standard deviations below the highest (arXiv:2411.07641).

    The deviation is computed over the finite logits. Temperature scales both alike, so it does not affect the result.
    """

    def __call__(self, logits: Tensor, used: Setting) -> Tensor:
        old = used.take(logits)
        relative = old.double() - old.amax(-1, keepdim=True)
        real = relative.isfinite()
        count = real.sum(-1, keepdim=True)
        mean = row_sums(relative.masked_fill(~real, 0)) / count
        variance = row_sums((relative - mean).masked_fill(~real, 0).square()) / count
        return used.put(logits, torch.where(relative < -used.values * variance.sqrt(), -math.inf, old))


class TypicalP:
    """Locally typical sampling (arXiv:2202.00666).

    Tokens are ordered by |-log p - H|, where H is the entropy. The shortest prefix with mass >= typical_p is kept, and
    all tokens that tie with its last one.
    """

    def __call__(self, logits: Tensor, used: Setting) -> Tensor:
        old = used.take(logits)
        logprobs = row_log_softmax(old.double())  # [n, vocab]
        probs = logprobs.exp()
        entropy = entropies(probs)
        distance = (-logprobs - entropy).abs()
        # Tokens with mass >= typical_p have logprobs above `tail`, hence distances up to `reach`: only these are
        # sorted.
        tail = _tail_probability(used.values, probs.shape[-1]).log()
        reach = torch.maximum(-tail - entropy, entropy)
        tokens, real = compact(distance <= reach)
        near, order = distance.gather(1, tokens).masked_fill(~real, math.inf).sort(dim=-1, stable=True)
        mass = cumulative_sums(probs.gather(1, tokens).masked_fill(~real, 0).gather(1, order))
        last = (mass < used.values).sum(-1, keepdim=True).minimum(real.sum(-1, keepdim=True) - 1)
        return used.put(logits, torch.where(distance > near.gather(1, last), -math.inf, old))


class EpsilonCutoff:
    """Keeps tokens with at least the probability epsilon (arXiv:2210.15191); if none, the most probable ones."""

    def __call__(self, logits: Tensor, used: Setting) -> Tensor:
        old = used.take(logits)
        return used.put(logits, _cut(old, row_softmax(old.double()), used.values))


class EtaCutoff:
    """Keeps tokens with at least the probability min(epsilon, sqrt(epsilon) exp(-H)); if none, the most probable ones.

    H is the entropy (arXiv:2210.15191).
    """

    def __call__(self, logits: Tensor, used: Setting) -> Tensor:
        old = used.take(logits)
        probs = row_softmax(old.double())
        entropy = entropies(probs)
        return used.put(logits, _cut(old, probs, used.values.minimum(used.values.sqrt() * (-entropy).exp())))


class TopK:
    """Keeps the k highest logits and all that tie with the last of them."""

    def __call__(self, logits: Tensor, used: Setting) -> Tensor:
        k = used.values.long()  # [n, 1]
        old = used.take(logits)
        lowest = old.topk(int(k.max()), -1).values.gather(1, k - 1)
        return used.put(logits, torch.where(old < lowest, -math.inf, old))


class TopP:
    """Nucleus sampling (arXiv:1904.09751).

    Keeps a token if the more probable tokens together have less mass than top_p. Among equals the lower id counts as
    more probable. Probabilities are those after the previous steps.
    """

    def __call__(self, logits: Tensor, used: Setting) -> Tensor:
        old = used.take(logits)
        tokens, probs = _head(row_softmax(old.double()), used.values)
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(1, order)
        kept = (cumulative_sums(probs)[:, :-1] < used.values) & (probs[:, 1:] > 0)
        first, others = tokens[:, :1], tokens[:, 1:]
        tokens = torch.cat([first, others.where(kept, first)], -1)  # the first is always kept, and may be repeated
        return used.put(logits, torch.full_like(old, -math.inf).scatter_(1, tokens, old.gather(1, tokens)))


class MinP:
    """Keeps tokens with at least min_p times the highest probability (arXiv:2407.01082)."""

    def __call__(self, logits: Tensor, used: Setting) -> Tensor:
        old = used.take(logits)
        lowest = old.amax(-1, keepdim=True).double() + used.values.log()
        return used.put(logits, torch.where(old < lowest, -math.inf, old))


class ExcludeTopChoices:
    """XTC: of the tokens with at least the threshold's probability, only the least probable is kept.

    Among equals the lower id counts as more probable. Rows in which XTC does not apply this time are excluded
    beforehand.
    """

    def __call__(self, logits: Tensor, used: Setting) -> Tensor:
        old = used.take(logits)
        probs = row_softmax(old.double())
        above = (probs >= used.values) & old.isfinite()
        lowest = old.masked_fill(~above, math.inf).amin(-1, keepdim=True)
        ids = torch.arange(old.shape[-1], device=old.device)
        last = torch.where(above & (old == lowest), ids, -1).amax(-1, keepdim=True)  # -1 if there is none
        return used.put(logits, torch.where(above & (ids != last), -math.inf, old))


class SurpriseLimit:
    """Mirostat 2.0 (arXiv:2007.14966): keeps tokens with surprise -log2 p <= mu; if none, the most probable one."""

    def __call__(self, logits: Tensor, used: Setting) -> Tensor:
        old = used.take(logits)
        surprises = row_log_softmax(old.double()) / -math.log(2)
        kept = surprises <= used.values
        best = old.argmax(-1, keepdim=True)  # the lowest id among equals
        return used.put(logits, torch.where(kept.scatter(1, best, True), old, -math.inf))


TRUNCATIONS: Final[Mapping[str, Truncation]] = {
    "temperature": Temperature(),
    "top_n_sigma": TopNSigma(),
    "typical_p": TypicalP(),
    "epsilon_cutoff": EpsilonCutoff(),
    "eta_cutoff": EtaCutoff(),
    "top_k": TopK(),
    "top_p": TopP(),
    "min_p": MinP(),
    "xtc": ExcludeTopChoices(),
    "mirostat": SurpriseLimit(),
}
"""By the names in SamplingParams.sampler_order."""


Truncations = Callable[[Tensor, SamplingRows], Tensor]
"""Applies all truncation steps to logits [rows, vocab]. Returns the logits to sample from: a copy, or the argument
itself if nothing changes."""


def truncate(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Truncations with torch, on any device."""
    if rows.truncations:
        logits = logits.clone()
    for used in rows.truncations:
        logits = TRUNCATIONS[used.name](logits, used)
    return logits


def compact(kept: Tensor) -> tuple[Tensor, Tensor]:
    """The columns that each row of a mask keeps, ascending, [rows, width], and which of them are real.

    The fullest row determines the width; other rows are padded with column 0.
    """
    row, column = places(kept)
    if len(kept) == 1:
        return column.unsqueeze(0), torch.ones(1, len(column), dtype=torch.bool, device=kept.device)
    counts = row.bincount(minlength=len(kept))
    place = torch.arange(len(row), device=kept.device) - (counts.cumsum(0) - counts)[row]
    columns = torch.zeros(len(kept), int(counts.max()), dtype=torch.int64, device=kept.device)
    columns[row, place] = column
    return columns, torch.arange(columns.shape[1], device=kept.device) < counts.unsqueeze(1)


def places(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column indices of a mask, row by row. Same as nonzero, but on CPU numpy takes a fifth of the time."""
    if mask.device.type != "cpu":
        row, column = mask.nonzero(as_tuple=True)
        return row, column
    row_of, column_of = np.divmod(np.flatnonzero(mask.numpy()), mask.shape[1])
    return torch.from_numpy(row_of), torch.from_numpy(column_of)


def _head(probs: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable tokens of each row, by ascending id, [n, width], and their probabilities.

    They hold the mass [n, 1] plus half of the rest, so sums over them need no other tokens, whatever the rounding.
    Padding has probability 0.
    """
    for num_tail in (_SHORT_TAIL, probs.shape[-1]):  # most rows need only the first size
        tokens, real = compact(probs >= _tail_probability(mass, num_tail))
        head = probs.gather(1, tokens).masked_fill(~real, 0)
        if (head.sum(-1, keepdim=True) >= (1 + mass) / 2).all():
            break
    return tokens, head


def _cut(logits: Tensor, probs: Tensor, least: Tensor) -> Tensor:
    """Removes tokens below this probability [n, 1], except those with the highest logit."""
    return torch.where((probs < least) & (logits < logits.amax(-1, keepdim=True)), -math.inf, logits)


def _tail_probability(mass: Tensor, num_tokens: int) -> Tensor:
    """A probability so low that `num_tokens` tokens below it hold at most half of 1 - mass."""
    return (1 - mass) / (2 * num_tokens)
