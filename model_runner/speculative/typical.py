"""Medusa's acceptance: a draft stands if the target finds it probable enough."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from model_runner.draft_tree import Fork
from model_runner.row_sums import entropies, row_softmax
from model_runner.sampling.draw import Draw
from model_runner.sampling.rows import SamplingRows

EPSILON = 0.09
DELTA = 0.3


class TypicalDraw:
    """Accepts the most probable draft x if p(x) > min(EPSILON, DELTA * exp(-H(p))), H the entropy; else draws from p.

    Medusa (arXiv:2401.10774, section 2.3.1), with the thresholds of its code. It changes the distribution, towards what
    is drafted: the more uncertain the target is, the less probable a draft may be. It differs from Medusa's code in two
    ways: drafts are compared level by level instead of by the longest path, and where none is accepted the token is
    the one that would be drawn without speculation, instead of the most probable one.
    """

    divides = False

    def __init__(self, forks: Sequence[Fork], draw: Draw) -> None:
        """
        Args:
            forks: the drafts for each row's token.
            draw: for where no draft is accepted.
        """
        self._forks = forks
        self._draw = draw

    def __call__(self, scores: Tensor, rows: SamplingRows) -> dict[int, int]:
        """See Draw."""
        drawn = sorted((*rows.whole, *rows.truncated))
        tested = [row for row in drawn if self._forks[row].tokens]
        tokens = self._accepted(scores, tested) if tested else {}
        others = tuple(row for row in drawn if row not in tokens)
        if others:
            tokens |= self._draw(scores, replace(rows, whole=(), truncated=others))
        return tokens

    def _accepted(self, scores: Tensor, tested: Sequence[int]) -> dict[int, int]:
        probs = row_softmax(scores[torch.tensor(tested, device=scores.device)].double())
        entropy = entropies(probs).squeeze(1)
        thresholds = (DELTA * (-entropy).exp()).clamp(max=EPSILON).tolist()
        tokens = {}
        for row, of_row, threshold in zip(tested, probs, thresholds, strict=True):
            drafts = self._forks[row].tokens
            chances: list[float] = of_row[torch.tensor(drafts, device=probs.device)].tolist()
            highest = max(chances)
            if highest > threshold:
                tokens[row] = drafts[chances.index(highest)]
        return tokens
