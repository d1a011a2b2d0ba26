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
from model_runner.sampling.rows import SamplingRows

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


Truncation = Callable[[Tensor, Tensor], Tensor]
"""One truncation step: takes logits [rows, vocab] float32, which it does not modify, and the values [rows, 1]."""


def _divide(logits: Tensor, values: Tensor) -> Tensor:
    """Divides the logits after shifting the highest to 0, so that small temperatures do not overflow."""
    old = logits.double()
    return old.sub_(old.amax(-1, keepdim=True)).div_(values).float()


def _top_n_sigma(logits: Tensor, values: Tensor) -> Tensor:
    """Keeps logits at most n standard deviations below the highest (arXiv:2411.07641).

    The deviation is computed over the finite logits. Temperature scales both alike, so it does not affect the result.
    """
    relative = logits.double() - logits.amax(-1, keepdim=True)
    real = relative.isfinite()
    count = real.sum(-1, keepdim=True)
    mean = row_sums(relative.masked_fill(~real, 0)) / count
    variance = row_sums((relative - mean).masked_fill(~real, 0).square()) / count
    return torch.where(relative < -values * variance.sqrt(), -math.inf, logits)


def _typical_p(logits: Tensor, values: Tensor) -> Tensor:
    """Locally typical sampling (arXiv:2202.00666).

    Tokens are ordered by |-log p - H|, where H is the entropy. The shortest prefix with mass >= typical_p is kept, and
    all tokens that tie with its last one.
    """
    logprobs = row_log_softmax(logits.double())  # [n, vocab]
    probs = logprobs.exp()
    entropy = entropies(probs)
    distance = (-logprobs - entropy).abs()
    # Tokens with mass >= typical_p have logprobs above `tail`, hence distances up to `reach`: only these are
    # sorted.
    tail = _tail_probability(values, probs.shape[-1]).log()
    reach = torch.maximum(-tail - entropy, entropy)
    tokens, real = compact(distance <= reach)
    near, order = distance.gather(1, tokens).masked_fill(~real, math.inf).sort(dim=-1, stable=True)
    mass = cumulative_sums(probs.gather(1, tokens).masked_fill(~real, 0).gather(1, order))
    last = (mass < values).sum(-1, keepdim=True).minimum(real.sum(-1, keepdim=True) - 1)
    return torch.where(distance > near.gather(1, last), -math.inf, logits)


def _epsilon_cutoff(logits: Tensor, values: Tensor) -> Tensor:
    """Keeps tokens with at least the probability epsilon (arXiv:2210.15191); if none, the most probable ones."""
    return _cut(logits, row_softmax(logits.double()), values)


def _eta_cutoff(logits: Tensor, values: Tensor) -> Tensor:
    """Keeps tokens with at least the probability min(epsilon, sqrt(epsilon) exp(-H)); if none, the most probable ones.

    H is the entropy (arXiv:2210.15191).
    """
    probs = row_softmax(logits.double())
    entropy = entropies(probs)
    return _cut(logits, probs, values.minimum(values.sqrt() * (-entropy).exp()))


def _top_k(logits: Tensor, values: Tensor) -> Tensor:
    """Keeps the k highest logits and all that tie with the last of them."""
    k = values.long()  # [n, 1]
    lowest = logits.topk(int(k.max()), -1).values.gather(1, k - 1)
    return torch.where(logits < lowest, -math.inf, logits)


def _top_p(logits: Tensor, values: Tensor) -> Tensor:
    """Nucleus sampling (arXiv:1904.09751).

    Keeps a token if the more probable tokens together have less mass than top_p. Among equals the lower id counts as
    more probable. Probabilities are those after the previous steps.
    """
    tokens, probs = _head(row_softmax(logits.double()), values)
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(1, order)
    kept = (cumulative_sums(probs)[:, :-1] < values) & (probs[:, 1:] > 0)
    first, others = tokens[:, :1], tokens[:, 1:]
    tokens = torch.cat([first, others.where(kept, first)], -1)  # the first is always kept, and may be repeated
    return torch.full_like(logits, -math.inf).scatter_(1, tokens, logits.gather(1, tokens))


def _min_p(logits: Tensor, values: Tensor) -> Tensor:
    """Keeps tokens with at least min_p times the highest probability (arXiv:2407.01082)."""
    lowest = logits.amax(-1, keepdim=True).double() + values.log()
    return torch.where(logits < lowest, -math.inf, logits)


def _exclude_top_choices(logits: Tensor, values: Tensor) -> Tensor:
    """XTC: of the tokens with at least the threshold's probability, only the least probable is kept.

    Among equals the lower id counts as more probable. Rows in which XTC does not apply this time are excluded
    beforehand.
    """
    probs = row_softmax(logits.double())
    above = (probs >= values) & logits.isfinite()
    lowest = logits.masked_fill(~above, math.inf).amin(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    last = torch.where(above & (logits == lowest), ids, -1).amax(-1, keepdim=True)  # -1 if there is none
    return torch.where(above & (ids != last), -math.inf, logits)


def _limit_surprise(logits: Tensor, values: Tensor) -> Tensor:
    """Mirostat 2.0 (arXiv:2007.14966): keeps tokens with surprise -log2 p <= mu; if none, the most probable one."""
    surprises = row_log_softmax(logits.double()) / -math.log(2)
    kept = surprises <= values
    best = logits.argmax(-1, keepdim=True)  # the lowest id among equals
    return torch.where(kept.scatter(1, best, True), logits, -math.inf)


TRUNCATIONS: Final[Mapping[str, Truncation]] = {
    "temperature": _divide,
    "top_n_sigma": _top_n_sigma,
    "typical_p": _typical_p,
    "epsilon_cutoff": _epsilon_cutoff,
    "eta_cutoff": _eta_cutoff,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
    "xtc": _exclude_top_choices,
    "mirostat": _limit_surprise,
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
        logits = used.put(logits, TRUNCATIONS[used.name](used.take(logits), used.values))
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
