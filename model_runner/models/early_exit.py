"""The model's head on hidden states from between its layers, through a copy of the model that shares its weights."""

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_runner.models.features import decoder_layers
from model_runner.models.refusal import UnsupportedModelError

Module = TypeVar("Module", bound=nn.Module)
_DICTS = dict, OrderedDict
"""What a module keeps its parameters, buffers, children and hooks in."""


def with_layers(model: PreTrainedModel, change: Callable[[nn.ModuleList], nn.ModuleList]) -> PreTrainedModel:
    """The model with other decoder layers in place of its own. Embedding, norm and head are shared with it.

    Raises UnsupportedModelError if the model's decoder layers cannot be found.
    """
    decoder_layers(model)
    changed = shallow_copy(model)
    for name, child in model.named_children():
        if child is model.get_decoder():  # type: ignore[no-untyped-call]
            setattr(changed, name, _decoder_with_layers(child, change))
    return changed


def _decoder_with_layers(decoder: nn.Module, change: Callable[[nn.ModuleList], nn.ModuleList]) -> nn.Module:
    changed = shallow_copy(decoder)
    config: Any = copy.copy(decoder.config)
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == decoder.config.num_hidden_layers:  # type: ignore[union-attr]
            layers = change(child)
            setattr(changed, name, layers)
            config.num_hidden_layers = len(layers)
    changed.config = config
    return changed


def twin(model: Module) -> Module:
    """The model again, in modules that can be hooked and bound to a cache by themselves. Weights are shared."""
    twins = {module: copy.copy(module) for module in model.modules()}
    for module, copied in twins.items():
        vars(copied).update(
            {name: copy.copy(of_own) for name, of_own in vars(module).items() if type(of_own) in _DICTS}
        )
        copied._modules.update({name: twins[child] for name, child in module._modules.items() if child is not None})
    return cast("Module", twins[model])


def shallow_copy(module: Module) -> Module:
    """A module that has the same parameters, buffers and children, which can be replaced without changing the other."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


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
