"""Heads in training on traffic: small steps without an end, from wherever they are."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from model_runner.learning.vocabulary import TokenCounts, rows_for
from model_runner.models.heads.base import Heads
from model_runner.models.heads.hydra import HydraHeads
from model_runner.training.examples import Example
from model_runner.training.objective import Objective
from model_runner.training.objectives import judge_of, objective_of
from model_runner.training.teacher import TargetWeights

LEARNING_RATE = 5e-4
AVERAGED = 0.95
"""Share of the mean that stays in a step: it is that of the last twenty or so."""
_WARM_UP = 32
"""Steps until the learning rate is reached: Adam has to get to know the sizes of the gradients."""
_CPU = torch.device("cpu")


class Trainee:
    """A candidate, on its way from the heads that it was given.

    It takes large steps, which single batches throw off course, and offers the running mean of where they led (Polyak
    and Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J. Control Optim. 30, 1992).
    """

    def __init__(self, heads: Heads, target: TargetWeights, dtype: torch.dtype, sample: Sequence[Example]) -> None:
        """Trains a copy of `heads`; `sample` is typical of what it will be trained on."""
        self._heads = copy.deepcopy(heads)
        self._target = target
        self._judge = judge_of(self._heads, target, _CPU, dtype)
        self._objective = objective_of(self._heads, target, self._judge, sample=sample)
        self._parameters: list[Tensor] = [one for one in self._objective.module.parameters() if one.requires_grad]
        self._means = [one.detach().clone() for one in self._parameters]
        self._optimizer = torch.optim.AdamW(self._parameters, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.steps = 0

    def step(self, examples: Sequence[Example]) -> bool:
        """Learn from a batch; False if the numbers have left their range, and the heads are of no use any more."""
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (self.steps + 1) / _WARM_UP)
        self._objective.module.train()
        self._optimizer.zero_grad()
        loss = self._objective.loss(examples)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._parameters, 1.0)
        if not math.isfinite(float(loss.detach()) + float(norm)):
            return False
        self._optimizer.step()
        self.steps += 1
        self._average()
        return True

    @contextmanager
    def candidate(self) -> Iterator[Objective]:
        """What training has led to, to be compared or exported."""
        self._swap()
        self._objective.module.eval()
        try:
            yield self._objective
        finally:
            self._swap()

    @torch.no_grad()
    def _average(self) -> None:
        """The first steps all count the same: what training began with shall not stay in the mean."""
        share = max(1 - AVERAGED, 1 / (self.steps + 1))
        torch._foreach_lerp_(self._means, self._parameters, share)

    def _swap(self) -> None:
        for parameter, mean in zip(self._parameters, self._means, strict=True):
            parameter.data, mean.data = mean.data, parameter.data

    @torch.no_grad()
    def follow(self, counts: TokenCounts) -> int:
        """Let frequent tokens take the rows of those that do not occur; returns how many did.

        Only where there is one matrix of logits for all depths, over a part of the vocabulary.
        """
        weight, ids = _shared_head(self._heads), self._heads.draft_ids
        if ids is None or weight is None:
            return 0
        rows, tokens = counts.swaps(ids)
        if len(rows):
            wanted, known = (self._target.head[some].to(weight) for some in (tokens, ids))
            mean = next(mean for one, mean in zip(self._parameters, self._means, strict=True) if one is weight)
            for matrix in (weight, mean):
                matrix[rows] = rows_for(wanted, known, matrix)
            ids[rows] = tokens
            self._judge.replace(rows, tokens)
            for moment in self._optimizer.state[weight].values():
                if moment.shape == weight.shape:
                    moment[rows] = 0.0
        return len(rows)


def _shared_head(heads: Heads) -> Tensor | None:
    head = heads.hydra_lm_head if isinstance(heads, HydraHeads) else getattr(heads, "lm_head", None)
    return head.weight if isinstance(head, nn.Linear) else None
