"""Medusa heads in training: every head at every place of an answer."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from model_runner.models.features import LAST
from model_runner.models.heads.medusa import MedusaHeads, MedusaShape
from model_runner.training.examples import Example
from model_runner.training.objective import Guess, Judge
from model_runner.training.rows import AnswerRows, answer_rows
from model_runner.training.teacher import TargetWeights


class MedusaObjective:
    """Implements Objective. Heads begin as the target's own: layers that change nothing, and its rows for logits."""

    needs = (LAST,)

    def __init__(self, target: TargetWeights, judge: Judge, depth: int, num_layers: int) -> None:
        shape = MedusaShape(target.shape.hidden, depth, num_layers, len(judge.draft_ids), shared_head=True)
        self._heads = MedusaHeads(shape, judge.draft_ids)
        self._judge = judge
        with torch.no_grad():
            for name, parameter in self._heads.named_parameters():
                if name == "lm_head.weight":
                    parameter.copy_(target.head[judge.draft_ids.cpu()])
                else:
                    nn.init.zeros_(parameter)
        self.module = self._heads.to(judge.device)

    def loss(self, examples: Sequence[Example]) -> Tensor:
        """See Objective."""
        return self._judge.loss(self._guesses(answer_rows(examples, self.needs, self._judge.device)))

    @torch.no_grad()
    def ranks(self, examples: Sequence[Example]) -> Tensor:
        """See Objective."""
        rows = answer_rows(examples, self.needs, self._judge.device)
        return self._judge.ranks(self._guesses(rows), len(rows.tokens))

    def export(self) -> MedusaHeads:
        """See Objective."""
        return copy.deepcopy(self._heads).cpu()

    def _guesses(self, rows: AnswerRows) -> Iterator[Guess]:
        hidden = rows.features[LAST]
        for index in range(1, self._heads.depth + 1):
            at = rows.before(index)
            with self._judge.products():
                logits = self._heads.head(index, hidden[at])
            yield Guess(at, logits, rows.tokens[at + index], hidden[at + index])
