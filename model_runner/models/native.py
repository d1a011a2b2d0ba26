"""Products with weights in int8 or int4, by the native kernels."""

from dataclasses import dataclass

from torch import Tensor

from model_runner.kernels.library import INT4_GROUP, Kernels, NativeWeight, WeightKind


class NativeProduct:
    """Rows are rounded to 12 bits with one scale each, and sums are such that rows cannot influence each other."""

    def __init__(self, kernels: Kernels, weight: NativeWeight) -> None:
        self._kernels = kernels
        self.weight = weight

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """See packed.Product."""
        result = self._kernels.linear(self.weight, rows.contiguous())
        return result if bias is None else result.add_(bias)


@dataclass(frozen=True, slots=True)
class NativePacker:
    """Packs weights for the kernels: a packed.Packer."""

    kernels: Kernels
    kind: WeightKind

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> NativeWeight:
        """A weight [outputs, inputs] of this kind, but in int8 if its inputs make no whole groups of int4."""
        whole = weight.shape[1] % INT4_GROUP == 0
        return self.kernels.pack(self.kind if whole else "int8", weight.detach().float().contiguous(), bias)

    def __call__(self, weight: Tensor) -> NativeProduct:
        """See packed.Packer."""
        return NativeProduct(self.kernels, self.pack(weight))
