"""Weights in packed formats behind ordinary modules.

A packed weight replaces the parameter of any module that calls F.linear, so the module needs no change.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model_runner.kernels.library import NativeWeight
from model_runner.torch_private import hollow_tensor


class Product(Protocol):
    """Multiplies rows with one weight. A row's result does not depend, in any bit, on other rows."""

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Rows [n, in] -> [n, out], in the rows' type."""
        ...


Packer = Callable[[Tensor], Product]
"""Takes a weight [out, in]."""


class PackedWeight(Tensor):
    """Replaces a weight [out, in]: it supports `F.linear(x, weight, bias)`, `weight @ columns` and casts.

    A cast weight is the same product for rows of another type; the product decides which types it supports.
    """

    _product: Product

    @staticmethod
    def __new__(cls: "type[PackedWeight]", weight: Tensor, pack: Packer) -> "PackedWeight":
        """Pack the weight."""
        return cls._wrap(weight, weight.dtype, pack(weight))

    @classmethod
    def _wrap(cls, weight: Tensor, dtype: torch.dtype, product: Product) -> "PackedWeight":
        device = torch.device("cpu") if weight.is_meta else weight.device
        wrapper = hollow_tensor(cls, weight.shape, dtype, device)
        wrapper._product = product
        return wrapper

    @classmethod
    def of_product(cls, product: Product, outputs: int, inputs: int) -> "PackedWeight":
        """A weight [outputs, inputs] that is already packed."""
        return cls._wrap(torch.empty(outputs, inputs, device="meta"), torch.float32, product)

    @property
    def product(self) -> Product:
        """The product that multiplies with this weight."""
        return self._product

    def linear(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Inputs [..., in] -> [..., out]."""
        result = self._product(inputs.reshape(-1, inputs.shape[-1]), bias)
        return result.view(*inputs.shape[:-1], result.shape[-1])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Route F.linear and weight @ columns to the product; shape, dtype and device work as usual."""
        if func is F.linear and isinstance(args[1], PackedWeight):
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            return args[1].linear(args[0], bias)
        if func in _MATRIX_PRODUCTS and isinstance(args[0], PackedWeight) and not isinstance(args[1], PackedWeight):
            return args[0].linear(args[1].mT).mT  # the steps of Mamba, from columns [..., in, n]
        dtype = torch.float32 if func is Tensor.float else args[-1]
        casts = func is Tensor.float or (func in (Tensor.to, Tensor.type) and len(args) == 2)
        if casts and isinstance(dtype, torch.dtype) and not kwargs:
            # Routers that compute in float32 cast their weight (DeepSeek-V3).
            return args[0] if dtype == args[0].dtype else cls._wrap(args[0], dtype, args[0]._product)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse everything else: it would need the dense weight, which was freed."""
        raise NotImplementedError(f"{func} is not supported on packed weights, but this model uses it")


_MATRIX_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class NativeProduct:
    """A product of rows that are rounded to integers with one scale each; integer sums keep rows independent."""

    def __init__(self, multiply: Callable[[NativeWeight, Tensor], Tensor], weight: NativeWeight) -> None:
        """`multiply` is `Kernels.linear`, or chooses the kernels at each call."""
        self._multiply = multiply
        self.weight = weight

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        result = self._multiply(self.weight, rows.contiguous())
        return result if bias is None else result.add_(bias)
