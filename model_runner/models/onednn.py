"""Products of float32 weights that are fast at every number of rows, and the same whatever the other rows are.

`F.linear` in float32 chooses its kernel, and with it its rounding, by the number of rows. oneDNN's product with a
weight that was reordered beforehand is faster at few rows and nearly free of that: what is left of it depends on the
instruction set and the shape, so it is probed, and row counts outside the invariant range are padded or split into it.

oneDNN generates code for every number of rows it meets and keeps up to a thousand such kernels, some MiB each. Few
distinct numbers are therefore let through: up to 64 rows at a time, in steps of four above 16. At the sizes of
language models 64 rows are as fast, for each row, as more.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_PROBED_ROWS = (1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 17, 32, 47, 64, 100)
_EXACT_ROWS = 16
_ROW_STEP = 4


class ExactnessError(RuntimeError):
    """No way was found on this machine to multiply so that rows do not influence each other."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Numbers of rows among which a product gives each row the same bits."""

    smallest: int
    largest: int = 64

    def apply(self, product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """product(rows [n, in]) -> [n, out], computed with few distinct row counts, all inside the range."""
        count = len(rows)
        if count > self.largest:
            return torch.cat([self.apply(product, part) for part in torch.split(rows, self.largest)])
        padded = max(self.smallest, count if count <= _EXACT_ROWS else -(-count // _ROW_STEP) * _ROW_STEP)
        if padded == count:
            return product(rows)
        return product(F.pad(rows, (0, 0, 0, padded - count)))[:count]


def probe_row_range(product: Callable[[Tensor], Tensor], width: int) -> RowRange:
    """The widest range of row counts in which `product` of rows [n, width] is invariant.

    Checks that rows come out the same for different numbers of rows and at different places among them.
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
    raise ExactnessError(f"products of width {width} depend on the other rows for every number of rows")


class OneDNNProduct:
    """A float32 weight [out, in] reordered for oneDNN."""

    def __init__(self, weight: Tensor, row_range: RowRange | None = None) -> None:
        """`row_range` is probed when it is not given."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self.row_range = row_range or probe_row_range(self._multiply, weight.shape[1])

    def _multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return result

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """See packed.Product."""
        return self.row_range.apply(lambda part: self._multiply(part, bias), rows)


class OneDNNPacker:
    """Packs float32 weights; one probe serves all of a shape."""

    def __init__(self) -> None:
        self._row_ranges: dict[torch.Size, RowRange] = {}

    def __call__(self, weight: Tensor) -> OneDNNProduct:
        """See packed.Packer."""
        product = OneDNNProduct(weight, self._row_ranges.get(weight.shape))
        self._row_ranges[weight.shape] = product.row_range
        return product
