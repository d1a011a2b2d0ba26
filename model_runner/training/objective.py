"""Training objectives of draft heads, for training before serving and for learning while serving.

examples -> Objective.guesses -> Judge.loss: how far the heads are from the target's distribution
                              -> Judge.ranks: which of their guesses came true
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model_runner.features import LAST, Feature
from model_runner.heads.base import Example, Heads
from model_runner.training.teacher import TargetWeights

_CHUNK_NUMBERS = 1 << 20
"""Logits processed at a time, so that they and their temporaries stay in the processor's cache."""


class _SoftCrossEntropy(torch.autograd.Function):
    """Implements soft_cross_entropy. It computes the gradient together with the loss and keeps only that."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
        gradient = torch.empty_like(logits)
        total = torch.zeros((), device=logits.device)
        size = max(1, _CHUNK_NUMBERS // logits.shape[1])
        for start in range(0, len(logits), size):
            part = slice(start, start + size)
            logprobs = logits[part].float().log_softmax(1)
            probs = teacher[part].float().softmax(1)
            weight = weights[part].unsqueeze(1)
            total -= (probs * logprobs).mul_(weight).sum()
            gradient[part] = logprobs.exp_().sub_(probs).mul_(weight)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None


def soft_cross_entropy(logits: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of -sum_v p(v) log q(v), with q from the logits and p from the teacher.

    Args:
        logits: [n, vocab], with gradient.
        teacher: [n, vocab], without gradient.
        weights: [n] float32, not negative.
    """
    total: Tensor = _SoftCrossEntropy.apply(logits, teacher, weights)  # type: ignore[no-untyped-call]
    return total / weights.sum().clamp_min(1.0)


RANKS = 8
"""Number of first guesses among which the actual token is searched."""


class Objective(ABC):
    """Heads in training, or in comparison. It owns the heads, and loads the target's parts that they need."""

    def __init__(self, heads: Heads, judge: "Judge") -> None:
        self.heads = heads.requires_grad_().to(judge.device)
        self.judge = judge
        self.needs: tuple[Feature, ...] = tuple(dict.fromkeys((*heads.needs, LAST)))
        """Features of the examples that training uses."""

    @abstractmethod
    def guesses(self, examples: Sequence[Example]) -> Iterator["Guess"]:
        """The predictions of each depth, wherever an answer is long enough."""

    def loss(self, examples: Sequence[Example]) -> Tensor:
        """The loss, a scalar."""
        return self.judge.loss(self.guesses(examples))

    @torch.no_grad()
    def ranks(self, examples: Sequence[Example]) -> Tensor:
        """Ranks of the actual tokens among the predictions, in evaluation mode.

        Returns:
            [R, depth] int64 for R positions in answers: the rank (0 for the first guess) of the actual token in each
            depth's prediction, given the actual tokens before it. RANKS if it is not among the first guesses, -1 after
            the end of the answer.
        """
        self.heads.eval()
        return self.judge.ranks(self.guesses(examples), sum(one.num_answer for one in examples))

    def export(self) -> Heads:
        """A copy of the current heads on the CPU, ready to be saved."""
        return copy.deepcopy(self.heads).cpu()


@dataclass(frozen=True, slots=True)
class Guess:
    """One depth's predictions at some rows of answers."""

    rows: Tensor  # [n] int64
    logits: Tensor  # [n, draft_vocab]
    tokens: Tensor  # [n] the actual tokens
    teacher: Tensor  # [n, hidden] input of the target's head for the same tokens


class Judge:
    """Compares predictions with the target. Tokens outside the draft vocabulary are not trained on, but count as
    misses.
    """

    def __init__(self, target: TargetWeights, draft_ids: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """Judges predictions of these tokens; products run in `dtype`."""
        self.target = target
        self.draft_ids = draft_ids.to(device)
        self.device = device
        self.dtype = dtype

    @cached_property
    def _rows(self) -> Tensor:
        """[draft_vocab, hidden] of the target's head; copied at first use, because comparisons do not need it."""
        return self.target.head[self.draft_ids.cpu()].to(self.device, self.dtype)

    @cached_property
    def _row_of(self) -> Tensor:
        """[vocab] each token's row in the draft vocabulary, or -1."""
        row_of = torch.full((self.target.shape.vocab_size,), -1, device=self.device)
        row_of[self.draft_ids] = torch.arange(len(self.draft_ids), device=self.device)
        return row_of

    def replace(self, rows: Tensor, tokens: Tensor) -> None:
        """Replace the tokens of these rows [n] of the draft vocabulary."""
        self._row_of[self.draft_ids[rows]] = -1
        self._row_of[tokens] = rows.to(self.device)
        self.draft_ids[rows] = tokens
        self._rows[rows] = self.target.head[tokens.cpu()].to(self._rows)

    def products(self) -> torch.autocast:
        """Context in which products use the faster type."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def loss(self, guesses: Iterable[Guess]) -> Tensor:
        """The mean cross entropy to the target's distribution over all predictions of all depths."""
        total, count = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for guess in guesses:
            weights = (self._row_of[guess.tokens] >= 0).float()
            total = total + soft_cross_entropy(guess.logits, self._teacher(guess.teacher), weights) * weights.sum()
            count += weights.sum()
        return total / count.clamp_min(1.0)

    @torch.no_grad()
    def _teacher(self, hidden: Tensor) -> Tensor:
        """Hidden states LAST [n, hidden] -> the target's logits [n, draft_vocab]."""
        logits = F.linear(hidden.to(self._rows.dtype), self._rows) * self.target.scale
        softcap = self.target.softcap
        return logits if softcap is None else (logits / softcap).tanh() * softcap

    @torch.no_grad()
    def guessed(self, guess: Guess, first: int) -> Tensor:
        """[n] bool: whether the actual token is among the `first` most probable ones."""
        row = self._row_of[guess.tokens]
        better = (guess.logits > guess.logits.gather(1, row.clamp_min(0).unsqueeze(1))).sum(1)
        return (better < first) & (row >= 0)

    def ranks(self, guesses: Iterable[Guess], num_rows: int) -> Tensor:
        """Ranks as in `Objective.ranks`."""
        columns = []
        for guess in guesses:
            hit = self.guessed_best(guess.logits, guess.tokens, guess.teacher)
            column = torch.full((num_rows,), -1, device=self.device)
            column[guess.rows] = hit.float().argmax(1).where(hit.any(1), RANKS)
            columns.append(column)
        return torch.stack(columns, dim=1)

    def guessed_best(self, logits: Tensor, tokens: Tensor, teacher: Tensor) -> Tensor:
        """[n, RANKS] whether the actual token is the first, second, ... guess. The parameters are a Guess's fields."""
        best = self.draft_ids[logits.topk(min(RANKS, logits.shape[1])).indices]
        return best == tokens.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class AnswerRows:
    """R rows, answer after answer. Row r is the position before the answer's token `tokens[r]`."""

    features: Mapping[Feature, Tensor]  # each [R, hidden] float32
    tokens: Tensor  # [R] int64
    left: Tensor  # [R] number of rows of the same answer that follow

    def before(self, distance: int) -> Tensor:
        """Rows that are followed by at least `distance` rows of the same answer."""
        return (self.left >= distance).nonzero().squeeze(1)


def answer_rows(examples: Sequence[Example], needs: Collection[Feature], device: torch.device) -> AnswerRows:
    """All rows of the examples."""
    features = {
        need: _tensor(np.concatenate([one.features[need][one.num_prompt - 1 : -1] for one in examples]), device).float()
        for need in needs
    }
    tokens = np.concatenate([one.tokens[one.num_prompt :] for one in examples])
    left = np.concatenate([np.arange(one.num_answer)[::-1] for one in examples])
    return AnswerRows(features, _tensor(tokens, device), _tensor(left, device))


def _tensor(array: np.typing.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
