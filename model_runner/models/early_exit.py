"""The model's head on hidden states from between its layers."""

import logging
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_runner.models.refusal import UnsupportedModelError
from model_runner.models.truncated import shallow_copy, with_layers

logger = logging.getLogger("samewise.runner")


class EarlyExit(Protocol):
    """What a model would say if its last layers were left out."""

    num_layers: int
    """Of the whole model."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, vocab] after hidden states [n, hidden] that enter a layer, or leave the last one."""
        ...


class HFEarlyExit:
    """Implements EarlyExit for any model of transformers.

    The model runs with one layer, which returns the given hidden states whatever it gets: so final norm, head and what
    a family does after it (soft caps, scaled logits) are its own, in the form in which they were loaded.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedModelError if the model does not take this."""
        config: Any = model.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self._hidden = torch.empty(0)
        self._device = model.device
        try:
            self._model = with_layers(model, lambda layers: nn.ModuleList([self._stand_in(layers[0])]))
            norm = next(iter(model.parameters()))
            self(torch.zeros(1, config.hidden_size, dtype=norm.dtype, device=self._device))
        except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
            family = model.config.model_type
            raise UnsupportedModelError(f"{family} cannot end before its last layer: {error}") from error

    @torch.inference_mode()
    def __call__(self, hidden: Tensor) -> Tensor:
        """See EarlyExit."""
        self._hidden = hidden.unsqueeze(0)
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=self._device)
        output: Any = self._model(input_ids=tokens, position_ids=tokens, use_cache=False)
        self._hidden = torch.empty(0)
        if output.logits.shape[:2] != tokens.shape:
            raise ValueError(f"its logits have the shape {list(output.logits.shape)}")
        logits: Tensor = output.logits[0].float()
        return logits

    def _stand_in(self, layer: nn.Module) -> nn.Module:
        """It has all that the decoder may want to know of a layer."""
        stand_in = shallow_copy(layer)
        stand_in.forward = self._insert
        return stand_in

    def _insert(self, *arguments: Any, **keywords: Any) -> Tensor:
        return self._hidden


def find_early_exit(model: PreTrainedModel) -> EarlyExit | None:
    """None, with a line in the log, if the model's family does not take this."""
    try:
        return HFEarlyExit(model)
    except UnsupportedModelError as error:
        logger.info("no DoLa    %s", error)
        return None
