"""A model with other layers than its own, which shares all the rest with it."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

Module = TypeVar("Module", bound=nn.Module)


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The model without its layers from number `count` on. Embedding, layers, norm and head are shared with it."""
    return with_layers(model, lambda layers: layers[:count])


def with_layers(model: PreTrainedModel, change: Callable[[nn.ModuleList], nn.ModuleList]) -> PreTrainedModel:
    """The model with other decoder layers in place of its own. Embedding, norm and head are shared with it."""
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


def shallow_copy(module: Module) -> Module:
    """A module that has the same parameters, buffers and children, which can be replaced without changing the other."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
