"""Weights whose products are fast at every number of rows, and the same whatever the other rows are.

`F.linear` in float32 chooses its kernel, and with it its rounding, by the number of rows. oneDNN's product with a
weight that was reordered beforehand is faster at few rows and nearly free of that: what is left of it depends on the
instruction set and the shape, so it is probed, and row counts outside the invariant range are padded or split into it.

oneDNN generates code for every number of rows it meets and keeps up to a thousand such kernels, some MiB each. Few
distinct numbers are therefore let through: up to 64 rows at a time, in steps of four above 16. At the sizes of
language models 64 rows are as fast, for each row, as more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class PackedWeight(Tensor):
    """A float32 weight [out, in] reordered for oneDNN. It can do one thing: `F.linear(x, weight, bias)`.

    It stands in for the parameter of any module that calls F.linear, so that the module itself stays as it is.
    """

    _packed: Tensor
    _row_range: RowRange

    @staticmethod
    def __new__(cls: "type[PackedWeight]", weight: Tensor, row_range: RowRange | None = None) -> "PackedWeight":
        """`row_range` is probed when it is not given."""
        wrapper: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, weight.shape, dtype=weight.dtype, device=weight.device
        )
        wrapper._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        wrapper._row_range = row_range or probe_row_range(wrapper._product, weight.shape[1])
        return wrapper

    @property
    def row_range(self) -> RowRange:
        """The range found by the probe; weights of the same shape share it."""
        return self._row_range

    def _product(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Rows [n, in] -> [n, out]."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return result

    def linear(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Inputs [..., in] -> [..., out]."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        result = self._row_range.apply(lambda part: self._product(part, bias), rows)
        return result.view(*inputs.shape[:-1], result.shape[-1])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Route F.linear here; shape, dtype and device are answered as usual."""
        if func is F.linear and isinstance(args[1], PackedWeight):
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            return args[1].linear(args[0], bias)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any other computation would need the dense weight, which is gone."""
        raise NotImplementedError(
            f"{func} on a packed weight: this model uses its weights in a way not supported on CPU"
        )


def pack_weights(model: nn.Module) -> None:
    """Replace every weight that the model multiplies with by a packed one.

    These are the 2-D `weight` parameters of all modules but embeddings: linears, the head, routers of experts. A weight
    shared with the embedding is copied, not taken away from it.
    """
    row_ranges: dict[torch.Size, RowRange] = {}
    for module in list(model.modules()):
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
            continue
        packed = PackedWeight(weight.data, row_ranges.get(weight.shape))
        row_ranges[weight.shape] = packed.row_range
        del module._parameters["weight"]
        module.weight = packed
