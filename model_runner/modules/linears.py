"""Packs the weights that modules multiply with, and multiplies in float32 so that rows do not influence each other."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_runner.torch_private import multiply_by_onednn, reorder_for_onednn
from model_runner.weights.packed_weight import PackedWeight, Packer

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
