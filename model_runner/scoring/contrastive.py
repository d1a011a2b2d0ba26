"""Contrastive decoding: what a larger model says, less what a smaller one says as well."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from model_runner.batch import Batch
from model_runner.contract import Contrastive, SamplingParams
from model_runner.models.features import Feature
from model_runner.models.target import TargetModel
from model_runner.scoring.transform import RawStep, Share


class ContrastiveDecoding:
    """Li et al., arXiv:2210.15097; O'Brien and Lewis, arXiv:2309.09117. See contract.Contrastive for the formula.

    The amateur computes the same tokens, at the same places, as the model does for these choices, and has keys and
    values of its own in blocks of the same numbers. So blocks computed for other choices are of no use to these: the
    scheduler does not share them.
    """

    def __init__(self, amateur: TargetModel) -> None:
        """The amateur has a cache of its own."""
        self._amateur = amateur

    def is_asked_by(self, sampling: SamplingParams) -> bool:
        """See ScoreTransform.is_asked_by."""
        return sampling.contrastive is not None

    def needs(self, sampling: SamplingParams) -> Collection[Feature]:
        """See ScoreTransform.needs."""
        return ()

    def __call__(self, step: RawStep, share: Share) -> Tensor:
        """See ScoreTransform. The amateur runs for prompts as well, where no scores are wanted yet."""
        amateur = self._amateur.forward(step.batch.only(share.choices))
        settings = [sampling.contrastive for sampling in share.sampling if sampling.contrastive is not None]
        return contrast(step.logits.index_select(0, share.rows), amateur, settings)

    def warm_up(self, batch: Batch) -> None:
        """See ScoreTransform.warm_up."""
        self._amateur.forward(batch)
        self._amateur.settle()


def contrast(expert: Tensor, amateur: Tensor, settings: Sequence[Contrastive]) -> Tensor:
    """Scores [n, vocab] from the logits of both models, by the settings of each row.

    Models with the same tokens may have logits of different widths, filled up with tokens that nobody uses: what only
    one of them has cannot be chosen.
    """
    weights = [(s.expert_weight, s.amateur_weight / s.temperature) for s in settings]
    of_expert, of_amateur = torch.tensor(weights, device=expert.device).view(-1, 2, 1).unbind(1)
    common = min(expert.shape[1], amateur.shape[1])
    scores = torch.full_like(expert, -torch.inf)
    scores[:, :common] = of_expert * expert[:, :common] - of_amateur * amateur[:, :common]
    return scores.masked_fill_(expert == -torch.inf, -torch.inf)
