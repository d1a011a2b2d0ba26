"""The target model: flat tokens in, logits out."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from torch import Tensor, nn

from model_runner.batch import Batch, IntArray
from model_runner.features import Feature
from model_runner.sampling.rows import EarlySamplingPlan, EarlyTokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LoadedModel(Protocol):
    """A model in memory: of transformers, or a NativeModel."""

    config: Any
    """The whole configuration."""

    def get_input_embeddings(self) -> Any:
        """The module that embeds tokens."""
        ...

    def get_output_embeddings(self) -> Any:
        """The module that turns hidden states into logits."""
        ...


def modules_of(model: LoadedModel) -> "PreTrainedModel":
    """The model, which must be of transformers."""
    assert isinstance(model, nn.Module), "a native model has no modules"
    return cast("PreTrainedModel", model)


class TargetModel(Protocol):
    """One forward pass over a step's tokens."""

    def forward(
        self,
        batch: Batch,
        also: Collection[Feature] = (),
        picks: EarlySamplingPlan | None = None,
        follows: IntArray | None = None,
    ) -> Tensor:
        """Float32 logits [rows, vocab] of the tokens in `batch.logits_index`. They are valid until the next pass.

        Args:
            batch: the step's tokens.
            also: features to capture in this pass, in addition to the permanent ones.
            picks: how to sample tokens from these logits; only for models with a `Pick`.
            follows: [T] for each token, the row of the previous pass whose sampled token replaces the batch's.
        """
        ...

    def features(self) -> Mapping[Feature, Tensor]:
        """The features of all tokens of the last forward pass, [T, width] each; can be taken once."""
        ...

    def picks(self) -> Callable[[], EarlyTokens]:
        """A function that waits for the tokens sampled in the last forward pass; call `picks` before the next pass."""
        ...

    def settle(self) -> None:
        """Called after warm-up: whatever was not needed until then will not be needed later."""
        ...


class OtherVocabulary:
    """Implements TargetModel for a second model whose vocabulary is padded to another size.

    Both models have the same tokens; extra entries stand for no text, but a prompt may contain them. The model gets its
    last token in place of one that it lacks. Tokens that the target lacks are cut from its logits.
    """

    def __init__(self, model: TargetModel, num_tokens: int, target_tokens: int) -> None:
        self._model = model
        self._num_tokens = num_tokens
        self._target_tokens = target_tokens

    def forward(
        self,
        batch: Batch,
        also: Collection[Feature] = (),
        picks: EarlySamplingPlan | None = None,
        follows: IntArray | None = None,
    ) -> Tensor:
        known = replace(batch, tokens=np.minimum(batch.tokens, self._num_tokens - 1))
        return self._model.forward(known, also, picks, follows)[:, : self._target_tokens]

    def features(self) -> Mapping[Feature, Tensor]:
        return self._model.features()

    def picks(self) -> Callable[[], EarlyTokens]:
        return self._model.picks()

    def settle(self) -> None:
        self._model.settle()
