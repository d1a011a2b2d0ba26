"""Tokens that a kernel finds for all rows of a step at once, before anybody asks for them.

They are what the model itself would say. Where nothing but a grammar has a say beside, such a token stands if the
grammar allows it, for what wins among all tokens wins among those that are allowed (but for the last bit of a score).
So most tokens need no mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class FusedSamplingPlan:
    """How each row of a step's logits is picked, known before the logits are; a row that nobody asks for is greedy."""

    keys: NDArray[np.uint64]  # [R] of the noise
    temperatures: NDArray[np.float64]  # [R] 0 takes the highest logit
    choices: frozenset[int]
    """Those that this serves at all of their rows, by their indices in the batch."""
    held: frozenset[int] = frozenset()
    """Of these, those that have a grammar: it has no say in the plan, so a token stands only if it allows it."""

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Keys, as the kernel takes them, and temperatures."""
        return self.keys.view(np.int64), self.temperatures

    @classmethod
    def greedy(cls, num_rows: int) -> "FusedSamplingPlan":
        """For nobody yet."""
        return cls(np.zeros(num_rows, dtype=np.uint64), np.zeros(num_rows), frozenset())


@dataclass(frozen=True, slots=True)
class PreSampledTokens:
    """What a plan has come to."""

    tokens: Sequence[int] = ()
    """Of each row of the step's logits; NO_TOKEN where the logits are not finite."""
    choices: frozenset[int] = frozenset()
    """Whose rows these are the tokens of; see FusedSamplingPlan."""


NO_PICKS = PreSampledTokens()


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows of logits that are picked among the tokens that grammars allow."""

    rows: Sequence[int]  # [count]
    keys: NDArray[np.uint64]  # [count] of the noise
    temperatures: NDArray[np.float64]  # [count] 0 takes the highest logit
    masks: NDArray[np.int32]  # [count, words] see vocabulary.Mask


PickAllowed = Callable[[Tensor, MaskedRows], Sequence[int]]
"""From logits [rows, vocab] to a token for each of these rows; NO_TOKEN where there is none to pick."""
