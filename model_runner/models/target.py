"""The model that answers: flat tokens in, logits out."""

from collections.abc import Collection, Mapping
from contextlib import closing, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model_runner.batch import Batch, IntArray
from model_runner.models.activations import ExactFunctions
from model_runner.models.features import Feature, FeatureTap
from model_runner.models.hf_attention import StepAttention


class TargetModel(Protocol):
    """One forward pass over a step's tokens."""

    def forward(self, batch: Batch, attention: StepAttention, also: Collection[Feature] = ()) -> Tensor:
        """Float32 logits [rows, vocab] of the tokens in `batch.logits_index`.

        `also` are features to take from this pass beside those that are taken from every one.
        """
        ...

    def features(self) -> Mapping[Feature, Tensor]:
        """Those of all tokens of the last forward pass, [T, width] each; once."""
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
        self._device = device
        self._tap = FeatureTap(model, needs)
        self._also: dict[Feature, Tensor] = {}
        self._functions = ExactFunctions() if device.type == "cpu" else None

    def settle(self) -> None:
        """No longer watch for activation functions, if the model called none: it costs time at every operation."""
        if self._functions is not None and not self._functions.was_needed:
            self._functions = None

    def features(self) -> Mapping[Feature, Tensor]:
        """See TargetModel.features."""
        also, self._also = self._also, {}
        return self._tap.take() | also

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: StepAttention, also: Collection[Feature] = ()) -> Tensor:
        """See TargetModel.forward."""
        if not also:
            return self._forward(batch, attention)
        with closing(FeatureTap(self._model, also)) as tap:
            logits = self._forward(batch, attention)
            self._also = tap.take()
        return logits

    def _forward(self, batch: Batch, attention: StepAttention) -> Tensor:
        with self._functions or nullcontext():
            output: Any = self._model(
                input_ids=self._tensor(batch.tokens).unsqueeze(0),
                position_ids=self._tensor(batch.positions).unsqueeze(0),
                use_cache=False,
                logits_to_keep=self._tensor(batch.logits_index),
                attention=attention,
            )
        logits: Tensor = output.logits[0].float()
        return logits

    def _tensor(self, numbers: IntArray) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)
