"""Training of Medusa heads: every head at every position of an answer."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from model_runner.features import LAST
from model_runner.heads.medusa import MedusaHeads, MedusaShape
from model_runner.training.objective import AnswerRows, Guess, Judge, ObjectiveByRow
from model_runner.training.teacher import TargetWeights


class MedusaObjective(ObjectiveByRow):
    """Implements Objective."""

    def __init__(self, judge: Judge, heads: MedusaHeads) -> None:
        """Starts from `heads` and takes ownership of them."""
        super().__init__((LAST,), judge)
        self._heads = heads.requires_grad_().to(judge.device)
        self.module = heads

    def export(self) -> MedusaHeads:
        return copy.deepcopy(self._heads).cpu()

    def guesses(self, rows: AnswerRows) -> Iterator[Guess]:
        """Predictions of all heads."""
        hidden = rows.features[LAST]
        for index in range(1, self._heads.depth + 1):
            at = rows.before(index)
            with self._judge.products():
                logits = self._heads.head(index, hidden[at])
            yield Guess(at, logits, rows.tokens[at + index], hidden[at + index])


@torch.no_grad()
def fresh_medusa(target: TargetWeights, draft_ids: Tensor, depth: int, num_layers: int) -> MedusaHeads:
    """Heads that start like the target's own head: identity layers, and the target's rows as output matrix."""
    heads = MedusaHeads(
        MedusaShape(target.shape.hidden, depth, num_layers, len(draft_ids), shared_head=True), draft_ids
    )
    for name, parameter in heads.named_parameters():
        if name == "lm_head.weight":
            parameter.copy_(target.head[draft_ids.cpu()])
        else:
            nn.init.zeros_(parameter)
    return heads
