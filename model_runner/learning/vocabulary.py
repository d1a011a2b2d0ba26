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
_RIDGE = 0.1
"""Of the mean variance of the target's rows, so that directions in which these hardly differ decide nothing."""


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


def rows_for(wanted: Tensor, known: Tensor, trained: Tensor) -> Tensor:
    """Rows [n, hidden] of a matrix of logits for tokens that it does not have.

    Training has moved and shrunk its rows since they were the target's: beside them, rows as the target has them would
    win over all others. What became of those that there are is what a ridge regression finds, and the new ones get.

    Args:
        wanted: the target's rows [n, hidden] of the new tokens.
        known: its rows [v, hidden] of the tokens that the matrix has.
        trained: the matrix [v, hidden].
    """
    change, mean = trained - known, known.mean(0)
    centred = known - mean
    gram = centred.T @ centred
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    weights = torch.linalg.solve(gram, centred.T @ (change - change.mean(0)))
    moved: Tensor = wanted + change.mean(0) + (wanted - mean) @ weights
    return moved
