"""The interface of products with a weight on the GPU."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class GpuProduct(Protocol):
    """Multiplies rows with one weight [out, in]."""

    def __call__(self, rows: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Rows [n, in] -> rows @ weight.T + bias + residual, [n, out] as the residual; rounded once."""
        ...


MakeProduct = Callable[[Tensor], GpuProduct]
"""Takes a weight [out, in], which may be freed afterwards."""
