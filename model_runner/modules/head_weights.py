"""Weights of several heads in one parameter, changed to linear layers, whose products do not depend on other rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class HeadWeights(nn.Module):
    """Replaces a parameter [heads, outputs, inputs] of which a model uses only `weight[:, None] @ columns`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.of_head = linears_of(weight)

    def __getitem__(self, index: tuple[slice, None]) -> "HeadWeights":
        """The same: `[:, None]` adds the dimension of the batch, which the product keeps."""
        assert index == (slice(None), None)
        return self

    def __matmul__(self, columns: Tensor) -> Tensor:
        """Columns [heads, batch, inputs, T] -> [heads, batch, outputs, T]."""
        products = (linear(rows) for linear, rows in zip(self.of_head, columns.mT, strict=True))
        return torch.stack(tuple(products)).mT


def linears_of(weights: Tensor) -> nn.ModuleList:
    """Linear layers without biases, of weights [count, outputs, inputs]."""
    return nn.ModuleList(_linear(weight) for weight in weights)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    return linear


def separate_heads(names: Sequence[str], module: Any, _: nn.Module) -> None:
    """Change the projections of these names that each head of a module has for itself, in place."""
    for name in names:
        weight = getattr(module, name)
        delattr(module, name)
        setattr(module, name, HeadWeights(weight))
