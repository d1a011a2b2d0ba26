"""Activation functions whose result for an element does not depend on its place in the tensor.

Torch's fused SiLU, GELU and sigmoid use vector instructions for most of a tensor, and a scalar function for the
remainder of each thread's share. The two differ in the last bit, so a value would depend on the batch's number of rows.
`exp`, `tanh` and `erf` use one routine for all elements, and add, multiply and divide are exact: the formulas below use
only these.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
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


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)); x itself above 20."""
    return x.exp().log1p_().where(x <= _LINEAR_FROM, x)


def xielu(module: hf.XIELUActivation) -> Callable[[Tensor], Tensor]:
    """XIELU (arXiv:2411.13010) with the factors that the module learned."""
    beta = module.beta.float()
    positive, negative = softplus(module.alpha_p.float()), beta + softplus(module.alpha_n.float())
    eps = float(module.eps)

    def compute(x: Tensor) -> Tensor:
        below = x.clamp(max=eps).expm1_().sub_(x).mul_(negative)
        return (positive * x).mul_(x).where(x > 0, below).add_(beta * x)

    return compute


_LINEAR_FROM = 20.0
"""Where softplus(x) becomes x, as in torch."""


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)²."""
    return torch.relu(x).square_()


EXACT: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.SiLU: silu,
    hf.SiLUActivation: silu,
    nn.Sigmoid: sigmoid,
    hf.GELUActivation: gelu,
    hf.GELUTanh: gelu_tanh,
    hf.NewGELUActivation: gelu_tanh,
    hf.FastGELUActivation: gelu_tanh,
    hf.AccurateGELUActivation: gelu_tanh,
    hf.QuickGELUActivation: quick_gelu,
    hf.SqrtSoftplusActivation: lambda x: softplus(x).sqrt_(),
    # These do not depend on the position:
    nn.ReLU: torch.relu,
    nn.Tanh: torch.tanh,
    hf.ReLUSquaredActivation: relu_squared,
    hf.LinearActivation: lambda x: x,
}
"""The exact implementation of each activation class."""


class ExactActivation(nn.Module):
    """An activation module that computes one of the formulas above."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise; does not modify x."""
        return self._function(x)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return gelu(x) if approximate == "none" else gelu_tanh(x)


_EXACT_FUNCTIONS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    F.silu: lambda x, inplace=False: silu(x),
    F.gelu: _gelu,
    F.sigmoid: sigmoid,
    F.softplus: softplus,
    torch.sigmoid: sigmoid,
    Tensor.sigmoid: sigmoid,
}
_INEXACT_FUNCTIONS = frozenset({F.mish, F.logsigmoid, torch.exp2, Tensor.exp2, Tensor.sigmoid_})


class ExactFunctions(TorchFunctionMode):
    """While active, replaces activation functions that model code calls with exact ones.

    Raises NotImplementedError for a function without an exact counterpart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.was_needed = False
        """Whether any of these functions was called."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the exact counterpart of `func`, if there is one."""
        if func in _INEXACT_FUNCTIONS:
            raise NotImplementedError(f"{func.__name__} is not supported on CPU")
        exact = _EXACT_FUNCTIONS.get(func)
        if exact is None:
            return func(*args, **(kwargs or {}))
        self.was_needed = True
        return exact(*args, **(kwargs or {}))


def replace_activations(model: nn.Module) -> None:
    """Replace the model's activation modules by exact ones.

    Raises:
        ValueError: for an activation without an exact counterpart.
    """
    known = {entry[0] if isinstance(entry, tuple) else entry for entry in hf.ACT2CLS.values()}
    for module in list(model.modules()):
        for name, child in module.named_children():
            function = xielu(child) if isinstance(child, hf.XIELUActivation) else EXACT.get(type(child))
            if function is not None:
                setattr(module, name, ExactActivation(function))
            elif type(child) in known:
                raise ValueError(f"activation {type(child).__name__} is not supported on CPU")
