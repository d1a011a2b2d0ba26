"""Heads that feed on themselves: one layer, run again for each further token (EAGLE, multi-token prediction)."""

from abc import abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor

from model_runner.kv_cache import KVShape
from model_runner.models.features import Feature
from model_runner.models.heads.base import Heads
from model_runner.models.heads.layer import Attend


class RecurrentHeads(Heads):
    """A step at place i takes a state for i and the embedding of the token at i + 1, and guesses the token at i + 2.

    The first state of a place comes from the target's features there; the states of guessed places are what the steps
    before them returned. Keys and values of a place are those of the step that had the target's features.
    """

    kv: KVShape
    """What attention keeps for each place."""
    scale: float
    """Factor on the products of queries and keys."""

    @abstractmethod
    def first_state(self, features: Mapping[Feature, Tensor]) -> Tensor:
        """The target's features [n, hidden] at n places -> their states [n, d]."""

    @abstractmethod
    def step(self, embedded: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """States after n places.

        Args:
            embedded: [n, d] of the tokens after the places, by `embed_tokens` if the heads have one.
            state: [n, d].
            positions: [n] int64, of the places.
            attend: the attention over the places before, which also remembers these.
        """

    @abstractmethod
    def logits(self, state: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """What a step returned, [n, d] -> [n, draft_vocab]; `target_head` is the target's own matrix of logits."""
