"""Products with weights in int8, by the native kernels."""

from torch import Tensor

from model_runner.kernels.library import Kernels


class Int8Product:
    """A weight [out, in] as int8 with one scale for each output; rows are rounded to 12 bits with one scale each.

    Sums are exact integers, so rows cannot influence each other.
    """

    def __init__(self, weight: Tensor, kernels: Kernels) -> None:
        self._kernels = kernels
        self._weight = kernels.pack_int8(weight.detach().float().contiguous())

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """See packed.Product."""
        result = self._kernels.linear(self._weight, rows.contiguous())
        return result if bias is None else result.add_(bias)
