"""The model that answers: flat tokens in, logits out."""

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model_runner.batch import Batch
from model_runner.models.activations import ExactFunctions
from model_runner.models.features import Feature, FeatureTap
from model_runner.models.hf_attention import StepAttention


class TargetModel(Protocol):
    """One forward pass over a step's tokens."""

    def forward(self, batch: Batch, attention: StepAttention) -> Tensor:
        """Float32 logits [rows, vocab] of the tokens in `batch.logits_index`."""
        ...

    def features(self) -> Mapping[Feature, Tensor]:
        """What proposers want to know of all tokens of the last forward pass, [T, width] each."""
        ...

    def settle(self) -> None:
        """Called after the first steps: what they did not need will not be needed later."""
        ...


class HFTargetModel:
    """A decoder-only model of transformers whose attention is ours.

    The head runs inside the model's own forward, for the wanted rows only, so that what a family does there (soft caps,
    scaled logits) is done.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, needs: Collection[Feature] = ()) -> None:
        """`needs` are the features to take from each forward pass. Raises UnsupportedModelError if it has them not."""
        self._model = model
        self._tap = FeatureTap(model, needs)
        self._functions = ExactFunctions() if device.type == "cpu" else None

    def settle(self) -> None:
        """No longer watch for activation functions, if the model called none: it costs time at every operation."""
        if self._functions is not None and not self._functions.was_needed:
            self._functions = None

    def features(self) -> Mapping[Feature, Tensor]:
        """See TargetModel.features."""
        return self._tap.take()

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: StepAttention) -> Tensor:
        """See TargetModel.forward."""
        with self._functions or nullcontext():
            output: Any = self._model(
                input_ids=batch.tokens.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=batch.logits_index,
                attention=attention,
            )
        logits: Tensor = output.logits[0].float()
        return logits
