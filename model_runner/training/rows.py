"""Answers laid out as rows: a hidden state, and the tokens after it."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_runner.models.features import Feature
from model_runner.training.examples import Example
from model_runner.training.objective import Guess, Judge


@dataclass(frozen=True, slots=True)
class AnswerRows:
    """R rows, answer after answer. Row r is the place before the answer's token `tokens[r]`."""

    features: Mapping[Feature, Tensor]  # each [R, hidden] float32
    tokens: Tensor  # [R] int64
    left: Tensor  # [R] how many rows of the same answer follow

    def before(self, distance: int) -> Tensor:
        """Rows that `distance` more rows of the same answer follow."""
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


class ObjectiveByRow(ABC):
    """What is common to heads that guess from each row by itself; see Objective."""

    def __init__(self, needs: tuple[Feature, ...], judge: Judge) -> None:
        self.needs = needs
        self._judge = judge

    @abstractmethod
    def guesses(self, rows: AnswerRows) -> Iterator[Guess]:
        """What each depth guesses, wherever the answer is long enough."""

    def loss(self, examples: Sequence[Example]) -> Tensor:
        """See Objective."""
        return self._judge.loss(self.guesses(answer_rows(examples, self.needs, self._judge.device)))

    @torch.no_grad()
    def ranks(self, examples: Sequence[Example]) -> Tensor:
        """See Objective."""
        rows = answer_rows(examples, self.needs, self._judge.device)
        return self._judge.ranks(self.guesses(rows), len(rows.tokens))
