"""Products with weights in int8 or int4, by the native kernels."""

from dataclasses import dataclass, replace

from torch import Tensor

from model_runner.kernels.library import INT4_GROUP, WIDEST_ROTATED, Kernels, NativeWeight, WeightKind


class NativeProduct:
    """Rows are rounded to integers with one scale each, and sums are such that rows cannot influence each other."""

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
    packs: Kernels | None = None
    """What packs, where `kernels`, which will multiply, may be at work meanwhile."""

    @property
    def in_int8(self) -> "NativePacker":
        """For what would lose too much in int4."""
        return replace(self, kind="int8") if self.kind == "int4" else self

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> NativeWeight:
        """A weight [outputs, inputs] of this kind, or in plain int8 if its inputs cannot have it."""
        packs = self.packs or self.kernels
        return packs.pack(self._kind_for(weight.shape[1]), weight.detach().float().contiguous(), bias)

    def _kind_for(self, inputs: int) -> WeightKind:
        fits = {"int4": inputs % INT4_GROUP == 0, "int8_rotated": inputs <= WIDEST_ROTATED}
        return self.kind if fits.get(self.kind, True) else "int8"

    def __call__(self, weight: Tensor) -> NativeProduct:
        """See packed.Packer."""
        return NativeProduct(self.kernels, self.pack(weight))
