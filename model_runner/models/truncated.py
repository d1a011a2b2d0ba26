"""A model's first layers as a model of its own."""

import copy
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

Module = TypeVar("Module", bound=nn.Module)


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The model without its layers from number `count` on. Embedding, layers, norm and head are shared with it."""
    truncated = _shallow_copy(model)
    for name, child in model.named_children():
        if child is model.get_decoder():  # type: ignore[no-untyped-call]
            setattr(truncated, name, _first_layers_of_decoder(child, count))
    return truncated


def _first_layers_of_decoder(decoder: nn.Module, count: int) -> nn.Module:
    truncated = _shallow_copy(decoder)
    num_layers = decoder.config.num_hidden_layers  # type: ignore[union-attr]
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            setattr(truncated, name, child[:count])
    config: Any = copy.copy(decoder.config)
    config.num_hidden_layers = count
    truncated.config = config
    return truncated


def _shallow_copy(module: Module) -> Module:
    """A module that has the same parameters, buffers and children, which can be replaced without changing the other."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
