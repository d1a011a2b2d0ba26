"""Hydra heads in training: every head at every place of an answer, given the actual tokens before it."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from model_runner.models.features import LAST, Feature
from model_runner.models.heads.hydra import HydraHeads, HydraShape
from model_runner.training.objective import Guess, Judge
from model_runner.training.rows import AnswerRows, ObjectiveByRow
from model_runner.training.teacher import TargetWeights

REACHED = 3
"""Head i + 1 is trained where the actual token was among so many first guesses of head i, as it was of all before it:
elsewhere a draft parts from the output. That spares half of the time, and the heads learn what they will be asked."""


class HydraObjective(ObjectiveByRow):
    """Implements Objective.

    Inputs are divided by their typical size, so that all weights learn at the same rate; `export` takes that into the
    weights. The shared head begins as the target's own rows.
    """

    def __init__(
        self,
        target: TargetWeights,
        judge: Judge,
        depth: int,
        num_layers: int,
        features: tuple[Feature, ...],
        sample: AnswerRows,
    ) -> None:
        """The heads take `features`; `sample` has the rows by which the size of the inputs is found."""
        hidden = target.shape.hidden
        shape = HydraShape(hidden, depth, num_layers, len(judge.draft_ids), shared_head=True, features=features)
        super().__init__(tuple(dict.fromkeys((*features, LAST))), judge)
        self._heads = HydraHeads(shape, judge.draft_ids)
        self._embedding = target.embedding.to(judge.device)
        self._hidden_size = self._heads.join(sample.features).square().mean(0).sqrt().clamp_min(1e-3)  # [F * hidden]
        self._embedding_size = self._embedding(sample.tokens).std()
        head = self._heads.hydra_lm_head
        assert isinstance(head, nn.Linear)
        with torch.no_grad():
            head.weight.copy_(target.head[judge.draft_ids.cpu()])
            for mlp in self._heads.hydra_mlp:
                first: Any = mlp[0]  # type: ignore[index]
                first.res_connection.weight.mul_(0.1)
        self.module = self._heads.to(judge.device)

    def export(self) -> HydraHeads:
        """See Objective."""
        heads = copy.deepcopy(self._heads).cpu()
        with torch.no_grad():
            for index, mlp in enumerate(heads.hydra_mlp):
                size = torch.cat([self._hidden_size, self._embedding_size.expand((index + 1) * heads.shape.hidden)])
                first: Any = mlp[0]  # type: ignore[index]
                for linear in (first.linear, first.res_connection):
                    linear.weight.div_(size.cpu())
        return heads

    def guesses(self, rows: AnswerRows) -> Iterator[Guess]:
        """See ObjectiveByRow. In training a head sees only the places that drafts reach: see REACHED."""
        hidden = self._heads.join(rows.features) / self._hidden_size
        embedded = self._embedding(rows.tokens) / self._embedding_size
        at = rows.before(1)
        for index in range(1, self._heads.depth + 1):
            at = at[rows.left[at] >= index]
            path = torch.stack([embedded[at + offset] for offset in range(index)], dim=1)  # [n, index, hidden]
            with self._judge.products():
                logits = self._heads.head(index, hidden[at], path)
            guess = Guess(at, logits, rows.tokens[at + index], rows.features[LAST][at + index])
            yield guess
            if self.module.training:
                at = at[self._judge.guessed(guess, REACHED)]
