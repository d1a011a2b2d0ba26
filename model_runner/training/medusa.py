"""Medusa heads in training: every head at every place of an answer."""

import copy
from collections.abc import Iterator

import torch
from torch import nn

from model_runner.models.features import LAST
from model_runner.models.heads.medusa import MedusaHeads, MedusaShape
from model_runner.training.objective import Guess, Judge
from model_runner.training.rows import AnswerRows, ObjectiveByRow
from model_runner.training.teacher import TargetWeights


class MedusaObjective(ObjectiveByRow):
    """Implements Objective. Heads begin as the target's own: layers that change nothing, and its rows for logits."""

    def __init__(self, target: TargetWeights, judge: Judge, depth: int, num_layers: int) -> None:
        shape = MedusaShape(target.shape.hidden, depth, num_layers, len(judge.draft_ids), shared_head=True)
        self._heads = MedusaHeads(shape, judge.draft_ids)
        super().__init__((LAST,), judge)
        with torch.no_grad():
            for name, parameter in self._heads.named_parameters():
                if name == "lm_head.weight":
                    parameter.copy_(target.head[judge.draft_ids.cpu()])
                else:
                    nn.init.zeros_(parameter)
        self.module = self._heads.to(judge.device)

    def export(self) -> MedusaHeads:
        """See Objective."""
        return copy.deepcopy(self._heads).cpu()

    def guesses(self, rows: AnswerRows) -> Iterator[Guess]:
        """See ObjectiveByRow."""
        hidden = rows.features[LAST]
        for index in range(1, self._heads.depth + 1):
            at = rows.before(index)
            with self._judge.products():
                logits = self._heads.head(index, hidden[at])
            yield Guess(at, logits, rows.tokens[at + index], hidden[at + index])
