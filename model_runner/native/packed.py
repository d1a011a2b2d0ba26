"""Weights in packed formats behind ordinary modules.

A packed weight replaces the parameter of any module that calls F.linear, so the module needs no change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_runner.kernels.library import NativeWeight
from model_runner.torch_private import hollow_tensor, multiply_by_onednn, reorder_for_onednn


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
_OTHER_NAMES = frozenset({"fn", "hc_fn", "index_kpool_compress_gate"})
"""Names of matrices that mix the streams of hyper-connections (arXiv:2409.19606), or make an indexer's gates."""


def pack_weights(model: nn.Module, pack: Packer, pack_others: Packer) -> None:
    """Replace every weight that the model multiplies with by a packed one.

    These are the 2-D `weight` parameters of all modules except embeddings and norms (Cohere's head norms have a weight
    of [heads, dim]), and matrices of hyper-connections and indexers. If the embedding shares a weight, it is copied,
    and the embedding keeps it.

    Args:
        model: changed in place.
        pack: for linear layers, including the head.
        pack_others: for routers of experts, and modules with their own products.
    """
    for module in list(model.modules()):
        own = dict(module.named_parameters(recurse=False))
        for name in _OTHER_NAMES & own.keys():
            other = own[name]
            delattr(module, name)
            setattr(module, name, PackedWeight(other.data, pack_others))
        weight = own.get("weight")
        is_other = isinstance(module, nn.Embedding) or type(module).__name__.endswith("Norm")
        if weight is None or weight.dim() != 2 or is_other:
            continue
        del module.weight
        is_plain = isinstance(module, nn.Linear) and not type(module).__name__.endswith("Router")
        module.weight = PackedWeight(weight.data, pack if is_plain else pack_others)


_PROBED_ROWS = (1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 17, 32, 47, 64, 100)
_EXACT_ROWS = 16
_ROW_STEP = 4


class ExactnessError(RuntimeError):
    """On this machine, no product was found whose rows do not influence each other."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Range of row counts for which a product gives each row the same bits."""

    smallest: int
    largest: int = 64

    def apply(self, product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """product(rows [n, in]) -> [n, out], computed with few distinct row counts, all within the range."""
        count = len(rows)
        if count > self.largest:
            return torch.cat([self.apply(product, part) for part in torch.split(rows, self.largest)])
        padded = max(self.smallest, count if count <= _EXACT_ROWS else -(-count // _ROW_STEP) * _ROW_STEP)
        if padded == count:
            return product(rows)
        return product(F.pad(rows, (0, 0, 0, padded - count)))[:count]


def probe_row_range(product: Callable[[Tensor], Tensor], width: int) -> RowRange:
    """The widest range of row counts for which `product` of rows [n, width] is invariant.

    Checks that a row's result is the same for different numbers of rows and different places among them.
    """
    rows = torch.randn(max(_PROBED_ROWS), width, generator=torch.Generator().manual_seed(0))
    for candidate in (RowRange(1), RowRange(2), RowRange(4), RowRange(8), RowRange(16), RowRange(16, 16)):
        expected = candidate.apply(product, rows)
        if all(
            torch.equal(candidate.apply(product, rows[start : start + n]), expected[start : start + n])
            for n in _PROBED_ROWS
            for start in {0, min(5, len(rows) - n)}
        ):
            return candidate
    raise ExactnessError(f"on this machine, products of width {width} depend on other rows for every number of rows")


class OneDNNProduct:
    """A float32 weight [out, in], reordered for oneDNN."""

    def __init__(self, weight: Tensor, row_range: RowRange | None = None) -> None:
        """`row_range` is probed if it is None."""
        self._packed = reorder_for_onednn(weight.detach().contiguous())
        self.row_range = row_range or probe_row_range(self._multiply, weight.shape[1])

    def _multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        return multiply_by_onednn(rows, self._packed, bias)

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return self.row_range.apply(lambda part: self._multiply(part, bias), rows)


class OneDNNPacker:
    """Packs float32 weights; probes each shape once."""

    def __init__(self) -> None:
        self._row_ranges: dict[torch.Size, RowRange] = {}

    def __call__(self, weight: Tensor) -> OneDNNProduct:
        product = OneDNNProduct(weight, self._row_ranges.get(weight.shape))
        self._row_ranges[weight.shape] = product.row_range
        return product


class NativeProduct:
    """A product of rows that are rounded to integers with one scale each; integer sums keep rows independent."""

    def __init__(self, multiply: Callable[[NativeWeight, Tensor], Tensor], weight: NativeWeight) -> None:
        """`multiply` is `Kernels.linear`, or chooses the kernels at each call."""
        self._multiply = multiply
        self.weight = weight

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        result = self._multiply(self.weight, rows.contiguous())
        return result if bias is None else result.add_(bias)
