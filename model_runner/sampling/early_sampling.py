"""Tokens that a kernel samples for all rows of a step at once, before the sampler runs.

They are sampled from the model's plain logits. If a grammar is the only other constraint, the token is kept if the
grammar allows it: the winner among all tokens also wins among the allowed ones (except for the last bit of a score).
So most tokens need no mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class EarlySamplingPlan:
    """How to sample each row of a step's logits, known before the logits are. Rows that are not used are greedy."""

    keys: NDArray[np.uint64]  # [R] of the noise
    temperatures: NDArray[np.float64]  # [R] 0 takes the highest logit
    choices: frozenset[int]
    """Choices whose rows are all sampled by this plan, by index in the batch."""
    with_grammar: frozenset[int] = frozenset()
    """Choices among these that have a grammar. The plan ignores it, so each token must be checked against the
    grammar."""

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Keys in the kernel's type, and temperatures."""
        return self.keys.view(np.int64), self.temperatures

    @classmethod
    def greedy(cls, num_rows: int) -> "EarlySamplingPlan":
        """A plan without choices."""
        return cls(np.zeros(num_rows, dtype=np.uint64), np.zeros(num_rows), frozenset())


@dataclass(frozen=True, slots=True)
class EarlyTokens:
    """The result of a EarlySamplingPlan."""

    tokens: Sequence[int] = ()
    """One per row of the step's logits; NO_TOKEN if the row is not finite."""
    choices: frozenset[int] = frozenset()
    """Choices for which these tokens are valid, as in EarlySamplingPlan."""


NO_EARLY_TOKENS = EarlyTokens()


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows of logits to sample from the tokens that grammars allow."""

    rows: Sequence[int]  # [count]
    keys: NDArray[np.uint64]  # [count] of the noise
    temperatures: NDArray[np.float64]  # [count] 0 takes the highest logit
    masks: NDArray[np.int32]  # [count, words], a grammar.Mask each


SampleAllowed = Callable[[Tensor, MaskedRows], Sequence[int]]
"""Samples logits [rows, vocab] at the given rows; NO_TOKEN where no token can be chosen."""
