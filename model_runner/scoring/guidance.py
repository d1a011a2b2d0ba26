"""Classifier-free guidance: the model, turned away from what it would say after another prompt."""

from collections.abc import Collection

import torch
from torch import Tensor

from model_runner.batch import Batch
from model_runner.contract import SamplingParams
from model_runner.models.features import Feature
from model_runner.row_sums import row_log_softmax
from model_runner.scoring.transform import RawStep, Share


class Guidance:
    """Sanchez et al., arXiv:2306.17806. See SamplingParams.guidance for the formula.

    The guide is a choice of its own in the same step, with blocks of its own.
    """

    def is_asked_by(self, sampling: SamplingParams) -> bool:
        """See ScoreTransform.is_asked_by."""
        return sampling.guidance is not None

    def needs(self, sampling: SamplingParams) -> Collection[Feature]:
        """See ScoreTransform.needs."""
        return ()

    def __call__(self, step: RawStep, share: Share) -> Tensor:
        """See ScoreTransform."""
        scales = [[sampling.guidance] for sampling in share.sampling]
        ready = [step.batch.guides[choice] for choice in share.choices if choice in step.batch.guides]
        guides = [row for guide in ready for row in guide.rows]
        own = step.logits.index_select(0, share.rows)
        other = step.logits.index_select(0, torch.tensor(guides, dtype=torch.int64, device=own.device))
        base = row_log_softmax(other)
        scale = torch.tensor(scales, dtype=base.dtype, device=base.device).view(-1, 1)
        scores = base + scale * (row_log_softmax(own) - base)
        return scores.masked_fill_(own == -torch.inf, -torch.inf)

    def warm_up(self, batch: Batch) -> None:
        """See ScoreTransform.warm_up."""
