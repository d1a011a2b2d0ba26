"""The model that answers: flat tokens in, logits out."""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model_runner.batch import Batch
from model_runner.models.hf_attention import StepAttention


class TargetModel(Protocol):
    """One forward pass over a step's tokens."""

    def forward(self, batch: Batch, attention: StepAttention) -> Tensor:
        """Float32 logits [rows, vocab] of the tokens in `batch.logits_index`."""
        ...


class HFTargetModel:
    """A decoder-only model of transformers whose attention is ours.

    The head runs inside the model's own forward, for the wanted rows only, so that what a family does there (soft caps,
    scaled logits) is done.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: StepAttention) -> Tensor:
        """See TargetModel.forward."""
        output: Any = self._model(
            input_ids=batch.tokens.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.logits_index,
            attention=attention,
        )
        logits: Tensor = output.logits[0].float()
        return logits
