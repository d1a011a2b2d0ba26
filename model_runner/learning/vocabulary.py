"""A draft vocabulary that follows the traffic.

Heads guess from a part of the target's vocabulary (training/vocabulary.py), and what is not in it is never guessed. So
tokens are counted as they come, the older ones for less, and where a missing token is clearly more frequent than one
that is there it takes that one's row of the heads' matrix of logits.
"""

import torch
from torch import Tensor

HALF_LIFE = 1 << 16
"""Tokens after which an occurrence counts half."""
_CLEARLY = 2.0
_LEAST = 3.0
"""A missing token has to occur so many times as often as the other one, and so many times more."""


class TokenCounts:
    """How often each token of the target's vocabulary occurred lately."""

    def __init__(self, vocab_size: int) -> None:
        self._counts = torch.zeros(vocab_size)

    def add(self, tokens: Tensor) -> None:
        """Of an output, [n]."""
        self._counts.mul_(0.5 ** (len(tokens) / HALF_LIFE))
        self._counts += torch.bincount(tokens, minlength=len(self._counts))

    def swaps(self, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n] of the draft vocabulary, and the tokens [n] to which they should belong.

        The rarest go first; of those equally rare, the highest ids, which byte-pair vocabularies give to rare tokens.
        """
        by_id = draft_ids.argsort(descending=True)
        rows = by_id[self._counts[draft_ids[by_id]].argsort(stable=True)]
        missing = self._counts.clone()
        missing[draft_ids] = -1.0
        frequent, tokens = missing.topk(min(len(rows), len(missing) - len(rows)))
        pairs = frequent >= _CLEARLY * self._counts[draft_ids[rows[: len(tokens)]]] + _LEAST
        count = int(pairs.long().cumprod(0).sum())
        return rows[:count], tokens[:count]
