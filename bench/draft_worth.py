"""What drafts of trained heads are worth in time: the best tree for a target whose steps take so long by rows."""

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_runner.models.heads.base import Heads
from model_runner.models.heads.hydra import HydraHeads
from model_runner.training.objective import RANKS, Judge
from model_runner.training.teacher import TargetWeights

_STEP_ROWS = (1, 2, 3, 4, 8, 16, 32)
_STEP_MS = (5.6, 6.4, 7.0, 7.5, 8.4, 11.7, 19.6)
"""Of the embedded model on two cores with AVX-512 VNNI, at a context of 200 tokens."""
_CALL_MS = 0.15
_BYTES_PER_MS = 30e6
"""What one depth of drafting takes: a call, and reading the weights in int8."""
_MOST_NODES = 12


@dataclass(frozen=True, slots=True)
class Worth:
    """Of the tree of fixed shape that is worth most."""

    nodes: int
    tokens_per_step: float
    speedup: float
    """Over steps without drafts."""


class NoisyJudge(Judge):
    """Ranks guesses as drafts of sampled answers are made: with the noise by which the target drew its own token.

    Where the target drew token y from p by Gumbel-max, that noise is distributed as follows: the largest of log p + g
    is Gumbel, and belongs to y; the others are Gumbels truncated there (Maddison et al., arXiv:1411.0030).
    """

    def __init__(self, target: TargetWeights, draft_ids: Tensor, dtype: torch.dtype) -> None:
        super().__init__(target, draft_ids, torch.device("cpu"), dtype)
        self._head = target.head.to(dtype)
        self.temperature = 0.0
        """Of the answers that are judged: 0 or 1."""

    def guessed_best(self, logits: Tensor, tokens: Tensor, teacher: Tensor) -> Tensor:
        """See Judge."""
        if not self.temperature:
            return super().guessed_best(logits, tokens, teacher)
        log_p = (teacher.to(self._head.dtype) @ self._head.T).float().log_softmax(1)
        highest = -torch.empty(len(tokens), 1).exponential_().log()
        log_p = log_p[:, self.draft_ids]
        noise = -((-highest).exp() + (-log_p).exp() * torch.empty_like(log_p).exponential_()).log() - log_p
        noise = torch.where(self.draft_ids == tokens.unsqueeze(1), highest - log_p, noise)
        return super().guessed_best(logits.float().log_softmax(1) + noise, tokens, teacher)


def worth(ranks: Tensor, heads: Heads) -> Worth:
    """Of ranks [rows, depth] as Objective.ranks gives them."""
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
    """Drafting so deep, with the weights in int8."""
    sizes = {name: one.numel() for name, one in heads.named_parameters()}
    if isinstance(heads, HydraHeads):
        shared = sum(size for name, size in sizes.items() if "lm_head" in name)
        each = [sum(size for name, size in sizes.items() if f"mlp.{index}." in name) for index in range(depth)]
        return sum(_CALL_MS + (size + shared) / _BYTES_PER_MS for size in each)
    once = sum(size for name, size in sizes.items() if name.startswith("fc."))
    return depth * (_CALL_MS + (sum(sizes.values()) - once) / _BYTES_PER_MS) + once / _BYTES_PER_MS
