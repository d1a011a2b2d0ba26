"""Weights that are kept in another form than torch's, behind modules that do not know.

A packed weight stands in for the parameter of any module that calls F.linear, so that the module itself stays as it is.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Product(Protocol):
    """Multiplies rows with one weight. A row's result does not depend, in any bit, on the other rows."""

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Rows [n, in] -> [n, out], of the rows' type."""
        ...


Packer = Callable[[Tensor], Product]
"""Takes a weight [out, in]."""


class PackedWeight(Tensor):
    """Stands in for a weight [out, in]: can be multiplied, `F.linear(x, weight, bias)`, and cast.

    A cast weight is the same product, for rows of another type; whether there is one is for the product to say.
    """

    _product: Product

    @staticmethod
    def __new__(cls: "type[PackedWeight]", weight: Tensor, pack: Packer) -> "PackedWeight":
        """Packs the weight."""
        return cls._wrap(weight, weight.dtype, pack(weight))

    @classmethod
    def _wrap(cls, weight: Tensor, dtype: torch.dtype, product: Product) -> "PackedWeight":
        wrapper: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, weight.shape, dtype=dtype, device=weight.device
        )
        wrapper._product = product
        return wrapper

    @property
    def product(self) -> Product:
        """What multiplies with it."""
        return self._product

    def linear(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Inputs [..., in] -> [..., out]."""
        result = self._product(inputs.reshape(-1, inputs.shape[-1]), bias)
        return result.view(*inputs.shape[:-1], result.shape[-1])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Route F.linear here; shape, dtype and device are answered as usual."""
        if func is F.linear and isinstance(args[1], PackedWeight):
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            return args[1].linear(args[0], bias)
        dtype = torch.float32 if func is Tensor.float else args[-1]
        casts = func is Tensor.float or (func in (Tensor.to, Tensor.type) and len(args) == 2)
        if casts and isinstance(dtype, torch.dtype) and not kwargs:
            # What routers that compute in float32 ask for (DeepSeek-V3).
            return args[0] if dtype == args[0].dtype else cls._wrap(args[0], dtype, args[0]._product)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any other computation would need the dense weight, which is gone."""
        raise NotImplementedError(
            f"{func} on a packed weight: this model uses its weights in a way that is not supported"
        )


def pack_weights(model: nn.Module, pack: Packer, pack_others: Packer) -> None:
    """Replace every weight that the model multiplies with by a packed one.

    These are the 2-D `weight` parameters of all modules but embeddings. A weight shared with the embedding is copied,
    not taken away from it.

    Args:
        model: changed in place.
        pack: for linears, the head among them.
        pack_others: for what multiplies in its own way, such as the routers of experts.
    """
    for module in list(model.modules()):
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
            continue
        del module._parameters["weight"]
        module.weight = PackedWeight(weight.data, pack if isinstance(module, nn.Linear) else pack_others)
