"""Early exit: the model's head applied to hidden states between layers, by a copy that shares the weights."""

import copy
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from model_runner.features import decoder_layers
from model_runner.refusal import UnsupportedModelError
from model_runner.torch_private import children_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Module = TypeVar("Module", bound=nn.Module)
_DICTS = dict, OrderedDict
"""Attributes in which a module keeps its parameters, buffers, children and hooks."""


def twin(model: Module) -> Module:
    """A copy of the model whose modules can be hooked and bound to another cache. Weights are shared."""
    twins = {module: copy.copy(module) for module in model.modules()}
    for module, copied in twins.items():
        vars(copied).update(
            {name: copy.copy(of_own) for name, of_own in vars(module).items() if type(of_own) in _DICTS}
        )
        children = children_of(module).items()
        children_of(copied).update({name: twins[child] for name, child in children if child is not None})
    return cast("Module", twins[model])


logger = logging.getLogger("samewise.runner")


class EarlyExit(Protocol):
    """The model's prediction without its last layers."""

    num_layers: int
    """Number of layers of the whole model."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, vocab] for hidden states [n, hidden] that enter a layer, or leave the last one."""
        ...


class HFEarlyExit:
    """Implements EarlyExit for any transformers model.

    The model runs with a single layer that returns the given hidden states. So final norm, head and later steps of the
    family (soft caps, scaled logits) are the model's own, as they were loaded.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        """Raises UnsupportedModelError if the model does not support this."""
        config: Any = model.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self._hidden = torch.empty(0)
        self._device = model.device
        try:
            self._model = self._with_one_layer(model)
            norm = next(iter(model.parameters()))
            self(torch.zeros(1, config.hidden_size, dtype=norm.dtype, device=self._device))
        except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
            family = model.config.model_type
            raise UnsupportedModelError(f"{family} does not support early exits: {error}") from error

    @torch.inference_mode()
    def __call__(self, hidden: Tensor) -> Tensor:
        self._hidden = hidden.unsqueeze(0)
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=self._device)
        output: Any = self._model(input_ids=tokens, position_ids=tokens, use_cache=False)
        self._hidden = torch.empty(0)
        if output.logits.shape[:2] != tokens.shape:
            raise ValueError(f"its logits have the shape {list(output.logits.shape)}")
        logits: Tensor = output.logits[0].float()
        return logits

    def _with_one_layer(self, model: "PreTrainedModel") -> "PreTrainedModel":
        """A twin whose only layer has every attribute that the decoder may read."""
        copied = twin(model)
        layers, decoder = decoder_layers(copied), copied.get_decoder()  # type: ignore[no-untyped-call]
        del layers[1:]
        layers[0].forward = self._insert
        decoder.config = copy.copy(decoder.config)
        decoder.config.num_hidden_layers = 1
        return copied

    def _insert(self, *arguments: Any, **keywords: Any) -> Tensor:
        return self._hidden


def find_early_exit(model: "PreTrainedModel") -> EarlyExit | None:
    """None, with a log line, if the model's family does not support this."""
    try:
        return HFEarlyExit(model)
    except UnsupportedModelError as error:
        logger.info("DoLa is not available: %s", error)
        return None
