"""Activation functions whose result for an element does not depend on where in the tensor it stands.

Torch's fused SiLU, GELU and sigmoid use vector instructions for the bulk of a tensor and the scalar library function
for what is left at the end of each thread's share, and the two differ in the last bit: an element's value then depends
on the number of rows in the batch. `exp`, `tanh` and `erf` go through one routine for all elements, and add, multiply
and divide are exact, so the formulas below are built from those.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import activations as hf


def silu(x: Tensor) -> Tensor:
    """X / (1 + exp(-x))."""
    return x / x.neg().exp_().add_(1)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return x.neg().exp_().add_(1).reciprocal_()


def gelu(x: Tensor) -> Tensor:
    """X / 2 (1 + erf(x / sqrt 2))."""
    return (x * math.sqrt(0.5)).erf_().add_(1).mul_(x).mul_(0.5)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    cubic = (x * x).mul_(x).mul_(0.044715).add_(x)
    return cubic.mul_(math.sqrt(2 / math.pi)).tanh_().add_(1).mul_(x).mul_(0.5)


def quick_gelu(x: Tensor) -> Tensor:
    """X sigmoid(1.702 x)."""
    return sigmoid(1.702 * x).mul_(x)


_EXACT: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.SiLU: silu,
    hf.SiLUActivation: silu,
    nn.Sigmoid: sigmoid,
    hf.GELUActivation: gelu,
    hf.GELUTanh: gelu_tanh,
    hf.NewGELUActivation: gelu_tanh,
    hf.FastGELUActivation: gelu_tanh,
    hf.AccurateGELUActivation: gelu_tanh,
    hf.QuickGELUActivation: quick_gelu,
    # Position-independent as they are:
    nn.ReLU: torch.relu,
    nn.Tanh: torch.tanh,
    hf.ReLUSquaredActivation: lambda x: torch.relu(x).square_(),
    hf.LinearActivation: lambda x: x,
}


class ExactActivation(nn.Module):
    """An activation by one of the formulas above."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise; x is left alone."""
        return self._function(x)


def replace_activations(model: nn.Module) -> None:
    """Put exact activations in place of the model's own.

    Raises:
        ValueError: for an activation that has no exact counterpart here.
    """
    known = {entry[0] if isinstance(entry, tuple) else entry for entry in hf.ACT2CLS.values()}
    for module in list(model.modules()):
        for name, child in module.named_children():
            function = _EXACT.get(type(child))
            if function is not None:
                setattr(module, name, ExactActivation(function))
            elif type(child) in known:
                raise ValueError(f"activation {type(child).__name__} is not supported on CPU")
