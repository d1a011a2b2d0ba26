"""Estimates the speedup by trained heads: finds the best fixed tree, given a step's duration by its rows."""

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_runner.heads.base import Heads
from model_runner.heads.hydra import HydraHeads
from model_runner.training.objective import RANKS, Judge
from model_runner.training.teacher import TargetWeights

_STEP_ROWS = (1, 2, 3, 4, 8, 16, 32)
_STEP_MS = (5.6, 6.4, 7.0, 7.5, 8.4, 11.7, 19.6)
"""Step durations for _STEP_ROWS: the embedded model, two cores with AVX-512 VNNI, a context of 200 tokens."""
_CALL_MS = 0.15
_BYTES_PER_MS = 30e6
"""Speed of reading int8 weights; drafting one depth takes _CALL_MS plus reading the heads' weights."""
_MOST_NODES = 12


@dataclass(frozen=True, slots=True)
class Worth:
    """Size and speedup of the best tree of fixed shape."""

    nodes: int
    tokens_per_step: float
    speedup: float
    """Speedup over steps without drafts."""


class NoisyJudge(Judge):
    """Ranks guesses for sampled answers, using the same noise with which the target drew its token.

    If the target drew token y from p by Gumbel-max, the largest of log p + g is Gumbel distributed and belongs to y.
    The others are Gumbel distributed and truncated there (Maddison et al., arXiv:1411.0030).
    """

    def __init__(self, target: TargetWeights, draft_ids: Tensor, dtype: torch.dtype) -> None:
        super().__init__(target, draft_ids, torch.device("cpu"), dtype)
        self._head = target.head.to(dtype)
        self.temperature = 0.0
        """Temperature of the judged answers: 0 or 1."""

    def guessed_best(self, logits: Tensor, tokens: Tensor, teacher: Tensor) -> Tensor:
        """Rank guesses with the target's noise at temperature 1, and by probability at 0."""
        if not self.temperature:
            return super().guessed_best(logits, tokens, teacher)
        log_p = (teacher.to(self._head.dtype) @ self._head.T).float().log_softmax(1)
        highest = -torch.empty(len(tokens), 1).exponential_().log()
        log_p = log_p[:, self.draft_ids]
        noise = -((-highest).exp() + (-log_p).exp() * torch.empty_like(log_p).exponential_()).log() - log_p
        noise = torch.where(self.draft_ids == tokens.unsqueeze(1), highest - log_p, noise)
        return super().guessed_best(logits.float().log_softmax(1) + noise, tokens, teacher)


def worth(ranks: Tensor, heads: Heads) -> Worth:
    """The best tree for ranks [rows, depth] from Objective.ranks."""
    reached = Counter[tuple[int, ...]]()
    for row in ranks.tolist():
        for depth, rank in enumerate(row):
            if rank in (-1, RANKS):
                break
            reached[tuple(row[: depth + 1])] += 1
    tree: list[tuple[int, ...]] = []
    front: list[tuple[int, tuple[int, ...]]] = [(-reached[rank,], (rank,)) for rank in range(RANKS)]
    heapq.heapify(front)
    tokens, best = 1.0, Worth(0, 1.0, 1.0)
    while front and len(tree) < _MOST_NODES:
        count, path = heapq.heappop(front)
        tree.append(path)
        tokens += -count / len(ranks)
        for rank in range(RANKS):
            heapq.heappush(front, (-reached[(*path, rank)], (*path, rank)))
        took = _step_ms(1 + len(tree)) + _draft_ms(heads, max(map(len, tree)))
        best = max(best, Worth(len(tree), tokens, tokens * _step_ms(1) / took), key=lambda one: one.speedup)
    return best


def _step_ms(rows: int) -> float:
    return float(np.interp(rows, _STEP_ROWS, _STEP_MS))


def _draft_ms(heads: Heads, depth: int) -> float:
    """Estimated milliseconds to draft `depth` tokens with int8 weights."""
    sizes = {name: one.numel() for name, one in heads.named_parameters()}
    if isinstance(heads, HydraHeads):
        shared = sum(size for name, size in sizes.items() if "lm_head" in name)
        each = [sum(size for name, size in sizes.items() if f"mlp.{index}." in name) for index in range(depth)]
        return sum(_CALL_MS + (size + shared) / _BYTES_PER_MS for size in each)
    once = sum(size for name, size in sizes.items() if name.startswith("fc."))
    return depth * (_CALL_MS + (sum(sizes.values()) - once) / _BYTES_PER_MS) + once / _BYTES_PER_MS
