"""DoLa: what the model says after its last layer, less what it would have said before it."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from model_runner.batch import Batch
from model_runner.contract import DoLa, SamplingParams
from model_runner.models.early_exit import EarlyExit
from model_runner.models.features import Feature, entering
from model_runner.row_sums import entropies, row_log_softmax
from model_runner.scoring.transform import RawStep, Share

_SPAN = 20
"""In models of more than twice as many layers, a half is so many of them."""
_ROWS = 64
"""Rows worked on at a time, to bound the memory."""


class LayerContrast:
    """Decoding by contrasting layers (Chuang et al., arXiv:2309.03883). See contract.DoLa for the formula.

    The premature layer is chosen for each row on its own; the authors' code chooses one for a whole batch, so that an
    answer would depend on the others.
    """

    def __init__(self, early_exit: EarlyExit, *, ties_embeddings: bool) -> None:
        """`ties_embeddings`: whether the head is the embedding."""
        self._exit = early_exit
        self._ties_embeddings = ties_embeddings

    def is_asked_by(self, sampling: SamplingParams) -> bool:
        """See ScoreTransform.is_asked_by."""
        return sampling.dola is not None

    def needs(self, sampling: SamplingParams) -> Collection[Feature]:
        """See ScoreTransform.needs."""
        return [entering(layer) for layer in self._candidates(sampling)]

    def __call__(self, step: RawStep, share: Share) -> Tensor:
        """See ScoreTransform."""
        scores = step.logits.new_empty(len(share.rows), step.logits.shape[1])
        for start in range(0, len(scores), _ROWS):
            piece = slice(start, start + _ROWS)
            candidates = [self._candidates(sampling) for sampling in share.sampling[piece]]
            scores[piece] = self._scores(step, share.rows[piece], candidates)
        return scores

    def _scores(self, step: RawStep, of_step: Tensor, candidates: Sequence[Sequence[int]]) -> Tensor:
        """[n, vocab] of these rows of the step, each of which asks its own layers."""
        logits = step.logits.index_select(0, of_step)
        tokens = torch.from_numpy(step.batch.logits_index).to(of_step.device).index_select(0, of_step)
        mature = row_log_softmax(logits.double())
        premature = torch.full_like(mature, torch.nan)  # stays where no distance is a number, and fails the row
        farthest = mature.new_full((len(mature),), -torch.inf)
        for layer in sorted({layer for of_row in candidates for layer in of_row}):
            asking = [row for row, of_row in enumerate(candidates) if layer in of_row]
            rows = torch.tensor(asking, device=logits.device)
            hidden = step.features[entering(layer)].index_select(0, tokens[rows])
            early = row_log_softmax(self._exit(hidden).double())
            distance = divergence(mature[rows], early)
            is_farther = distance > farthest[rows]  # among equals the lower layer stays
            farthest[rows[is_farther]] = distance[is_farther]
            premature[rows[is_farther]] = early[is_farther]
        return (mature - premature).float().masked_fill_(logits == -torch.inf, -torch.inf)

    def warm_up(self, batch: Batch) -> None:
        """See ScoreTransform.warm_up."""

    def _candidates(self, sampling: SamplingParams) -> Sequence[int]:
        assert sampling.dola is not None
        return candidate_layers(sampling.dola, self._exit.num_layers, ties_embeddings=self._ties_embeddings)


def candidate_layers(dola: DoLa, num_layers: int, *, ties_embeddings: bool) -> Sequence[int]:
    """The layers before which the model is asked; the choice of the paper, as transformers has written it down.

    The lower half begins with the embedding, or with layer 2 if the head is the embedding: then it would only say the
    last token again.
    """
    if isinstance(dola.layers, tuple):
        return dola.layers
    is_deep = num_layers > 2 * _SPAN
    if dola.layers == "high":
        return range(num_layers - _SPAN if is_deep else num_layers // 2, num_layers, 2)
    first = min(2, num_layers - 1) if ties_embeddings else 0
    return range(first, _SPAN if is_deep else num_layers // 2, 2) or (first,)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen and Shannon's, [n], of distributions given as log-probabilities [n, vocab] in float64."""
    p, q = p.exp(), q.exp()
    return _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2


def _entropy(probs: Tensor) -> Tensor:
    return entropies(probs).squeeze(1)
