"""Adapts the draft vocabulary to the traffic.

Heads predict only a part of the target's vocabulary (`training.teacher.choose_draft_ids`); other tokens are never
drafted. So tokens are counted as they come, with older ones decayed. If a missing token is clearly more frequent than
one in the draft vocabulary, it takes over that token's row of the output matrix.
"""

import torch
from torch import Tensor

HALF_LIFE = 1 << 16
"""Tokens after which an occurrence counts half."""
_CLEARLY = 2.0
_LEAST = 3.0
"""A missing token must occur this many times as often as the other one, and this many times more."""
_RIDGE = 0.1
"""Regularisation relative to the mean variance of the target's rows, so that directions without variation do not
matter."""


class TokenFrequencies:
    """How often each token of the target's vocabulary occurred recently."""

    def __init__(self, vocab_size: int) -> None:
        self._counts = torch.zeros(vocab_size)

    def add(self, tokens: Tensor) -> None:
        """Count the tokens [n] of an output."""
        self._counts.mul_(0.5 ** (len(tokens) / HALF_LIFE))
        self._counts += torch.bincount(tokens, minlength=len(self._counts))

    def swaps(self, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n] of the draft vocabulary to replace, and their new tokens [n].

        The rarest tokens are replaced first; among equals, the highest ids, which byte-pair vocabularies give to rare
        tokens.
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
    """Output rows [n, hidden] for tokens that the matrix does not have.

    Training has rotated and shrunk the matrix since it was copied from the target, so unchanged rows of the target
    would dominate. A ridge regression from the target's rows to the trained ones gives the transformation for new rows.

    Args:
        wanted: the target's rows [n, hidden] of the new tokens.
        known: the target's rows [v, hidden] of the tokens in the matrix.
        trained: the matrix [v, hidden].
    """
    change, mean = trained - known, known.mean(0)
    centred = known - mean
    gram = centred.T @ centred
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    weights = torch.linalg.solve(gram, centred.T @ (change - change.mean(0)))
    moved: Tensor = wanted + change.mean(0) + (wanted - mean) @ weights
    return moved
