"""Models that share their weights: one with other layers than another's, or one like it in modules of its own."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedModel

from model_runner.models.features import decoder_layers

Module = TypeVar("Module", bound=nn.Module)
_DICTS = dict, OrderedDict
"""What a module keeps its parameters, buffers, children and hooks in."""


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The model without its layers from number `count` on. Embedding, layers, norm and head are shared with it."""
    return with_layers(model, lambda layers: layers[:count])


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
