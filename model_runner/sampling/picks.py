"""Tokens that a kernel finds for all rows of a step at once, before anybody asks for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class PickPlan:
    """How each row of a step's logits is picked, known before the logits are; a row that nobody asks for is greedy."""

    keys: NDArray[np.uint64]  # [R] of the noise
    temperatures: NDArray[np.float64]  # [R] 0 takes the highest logit
    choices: frozenset[int]
    """Those that this serves at all of their rows, by their indices in the batch."""

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Keys, as the kernel takes them, and temperatures."""
        return self.keys.view(np.int64), self.temperatures

    @classmethod
    def greedy(cls, num_rows: int) -> "PickPlan":
        """For nobody yet."""
        return cls(np.zeros(num_rows, dtype=np.uint64), np.zeros(num_rows), frozenset())


@dataclass(frozen=True, slots=True)
class Prepicks:
    """What a plan has come to."""

    tokens: Sequence[int] = ()
    """Of each row of the step's logits; NO_TOKEN where the logits are not finite."""
    choices: frozenset[int] = frozenset()
    """Whose rows these are the tokens of; see PickPlan."""


NO_PICKS = Prepicks()
