"""Packs linear layers for the native kernels, while they are read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from typing import Protocol

import torch
from torch import Tensor

from model_runner.kernels.block_formats import find_block_format
from model_runner.kernels.library import (
    INT4_GROUP,
    PANEL,
    WIDEST_ROTATED,
    Kernels,
    NativeWeight,
    WeightKind,
)
from model_runner.kernels.memory import huge_pages
from model_runner.weights.matrix import Blocks, DenseMatrix, Linear, Matrix
from model_runner.weights.packed_weight import NativeProduct

_SLAB = 1 << 24
"""Weights that are in memory in float32 at once."""
SLAB_BYTES = 4 * _SLAB
"""Memory that packing takes, in addition to the packed weights."""

_ROWS_TO_ORDER = 256
"""Rows that are copied at once while their inputs are put in order."""


class WeightCache(Protocol):
    """Keeps the weights of one model that are packed from plain numbers."""

    def obtain(self, kind: WeightKind, linear: Linear, pack: Callable[[], NativeWeight]) -> NativeWeight:
        """The packed weight of a linear: from the cache, or packed now. Called in the order of the model's linears."""
        ...


@dataclass(frozen=True, slots=True)
class NativePacker:
    """Packs weights for the kernels; implements Packer."""

    kernels: Kernels
    kind: WeightKind
    packing_kernels: Kernels | None = None
    """The kernels that pack, if `kernels`, which will multiply, may be busy."""
    multiplies_stored_blocks: bool = False
    """Whether weights that a checkpoint stores in blocks keep them, and with them their values, whatever the kind."""
    cache: WeightCache | None = None
    """Weights that an earlier start has packed, if they are kept."""
    slab: Tensor | None = None
    """Float32 memory of `SLAB_BYTES` for the rows that are being packed; None: each linear allocates its own."""

    def with_slab(self) -> "NativePacker":
        """A packer for many linears, which reuses one slab as long as the packer lives.

        Slabs of many sizes would leave the heap full of holes that are too small for the next one.
        """
        return replace(self, slab=huge_pages(SLAB_BYTES).view(torch.float32))

    @property
    def in_int8(self) -> "NativePacker":
        """A packer for weights that would lose too much in int4."""
        return replace(self, kind="int8") if self.kind == "int4" else self

    def pack(self, linear: Linear) -> NativeWeight:
        """Pack a linear layer as this kind, or as plain int8 if its inputs do not fit the kind.

        If some outputs keep their blocks, outputs of plain numbers become plain int8, because rows are rounded
        once for all outputs. Only a slab of rows is in memory in float32 at once.
        """
        kind = self.kind_for(linear.inputs)
        pack = partial(self._pack_dense, linear.matrices, kind, linear.bias)
        if not self.keeps(linear):
            return pack() if self.cache is None else self.cache.obtain(kind, linear, pack)
        if not _take_the_same_rows([one.blocks() if self._keeps(one) else None for one in linear.matrices]):
            return pack()
        parts: list[NativeWeight] = []
        for keeps, matrices in groupby(linear.matrices, self._keeps):
            run = list(matrices)
            parts += [self._repack(one) for one in run] if keeps else [self._pack_dense(run, "int8")]
        return self._packing.join(parts, linear.bias)

    def pack_alike(self, linears: Sequence[Linear]) -> list[NativeWeight]:
        """Pack linear layers that are multiplied with the same rounded rows.

        If some keep their blocks, the others become plain int8. If blocks do not allow the same rows, none are kept.
        """
        keeps = any(map(self.keeps, linears))
        packer = replace(self, kind="int8") if keeps and self.kind == "int8_rotated" else self
        packed = [packer.pack(linear) for linear in linears]
        if len({weight.rows for weight in packed}) > 1:
            return replace(packer, multiplies_stored_blocks=False).pack_alike(linears)
        return packed

    def dense_kind(self, linear: Linear) -> WeightKind | None:
        """The kind that a linear is packed as from plain numbers; None if some of its outputs keep their blocks."""
        return None if self.keeps(linear) else self.kind_for(linear.inputs)

    def num_bytes(self, linear: Linear) -> int:
        """Memory of the packed weight."""
        if (kind := self.dense_kind(linear)) is not None:
            return self.kernels.packed_bytes(kind, linear.outputs, linear.inputs)
        return sum(
            self.kernels.repacked_bytes(matrix.block_format or 0, *matrix.shape)
            if self._keeps(matrix)
            else self.kernels.packed_bytes("int8", *matrix.shape)
            for matrix in linear.matrices
        )

    def keeps(self, linear: Linear) -> bool:
        """Whether some of the outputs keep their blocks."""
        return any(map(self._keeps, linear.matrices))

    def names(self, linear: Linear) -> set[str]:
        """The types that the weight is packed in, for log lines."""
        kinds = {
            found.name
            for matrix in linear.matrices
            if self._keeps(matrix) and (found := find_block_format(matrix.block_format or 0)) is not None
        }
        return kinds or {"int4" if self.kind_for(linear.inputs) == "int4" else "int8"}

    @property
    def _packing(self) -> Kernels:
        return self.packing_kernels or self.kernels

    def _keeps(self, matrix: Matrix) -> bool:
        number = matrix.block_format
        return self.multiplies_stored_blocks and number is not None and self.kernels.can_repack(number)

    def _repack(self, matrix: Matrix) -> NativeWeight:
        blocks = matrix.blocks()
        assert blocks is not None, "matrices in a block format have blocks"
        weight = self._packing.repack(
            blocks.block_format,
            blocks.rows,
            matrix.shape[1],
            blocks.order,
            output_scales=blocks.output_scales,
            input_order=blocks.input_order,
        )
        matrix.drop(0, matrix.shape[0])
        return weight

    def _pack_dense(self, matrices: Sequence[Matrix], kind: WeightKind, bias: Tensor | None = None) -> NativeWeight:
        outputs, inputs = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        weight = self._packing.start(kind, outputs, inputs, bias)
        first = 0
        for rows in self._slabs(matrices):
            self._packing.pack_rows(weight, first, rows)
            first += len(rows)
        return weight

    def _slabs(self, matrices: Sequence[Matrix]) -> Iterator[Tensor]:
        """Rows in float32, in whole panels except at the end. Each slab is valid until the next."""
        outputs, inputs = [matrix.shape[0] for matrix in matrices], max(matrices[0].shape[1], 1)
        step = max(_SLAB // inputs // PANEL, 1) * PANEL
        size = min(step, max(outputs)) * inputs
        memory = torch.empty(size) if self.slab is None or size > len(self.slab) else self.slab
        for parts in _slab_parts(outputs, step):
            if len(parts) == 1:
                ((index, start, stop),) = parts
                yield self._read(matrices[index], start, stop, memory)
            else:
                rows = [self._read(matrices[i], start, stop, torch.empty(PANEL * inputs)) for i, start, stop in parts]
                yield torch.cat(rows)
            for index, start, stop in parts:
                matrices[index].drop(start, stop)

    def _read(self, matrix: Matrix, start: int, stop: int, memory: Tensor) -> Tensor:
        """Rows [start, stop) in float32: as they are stored, or converted in float32 `memory` of at least this size."""
        inputs, blocks = matrix.shape[1], matrix.blocks()
        rows = memory.view(-1)[: (stop - start) * inputs].view(-1, inputs)
        if blocks is None:
            stored = matrix.read(start, stop)
            return stored if stored.dtype == rows.dtype and stored.is_contiguous() else rows.copy_(stored)
        if blocks.order is None:
            self._packing.unpack(blocks.block_format, blocks.rows[start:stop], inputs, output=rows)
        else:
            self._packing.unpack(blocks.block_format, blocks.rows, inputs, blocks.order[start:stop], rows)
        if blocks.output_scales is not None:
            rows *= blocks.output_scales[start:stop, None]
        if blocks.input_order is not None:
            for part in torch.split(rows, _ROWS_TO_ORDER):
                part[:, blocks.input_order.long()] = part.clone()
        return rows

    def kind_for(self, inputs: int) -> WeightKind:
        fits = {"int4": inputs % INT4_GROUP == 0, "int8_rotated": inputs <= WIDEST_ROTATED}
        return self.kind if fits.get(self.kind, True) else "int8"

    def __call__(self, weight: Tensor) -> NativeProduct:
        return NativeProduct(self.kernels.linear, self.pack(Linear([DenseMatrix(weight.detach())])))


def _slab_parts(outputs: Sequence[int], step: int) -> Iterator[list[tuple[int, int, int]]]:
    """Divide the rows of matrices, one below the other, into slabs of at most `step` rows, whole panels but the last.

    A slab is in one matrix, except for a panel in which a matrix ends.

    Returns:
        The parts of each slab: the index of a matrix, and its first and end row.
    """
    ends = list(accumulate(outputs))
    start = 0
    while start < ends[-1]:
        end = next(end for end in ends if end > start)
        whole = end if end == ends[-1] else end // PANEL * PANEL
        stop = min(start + step, whole) if whole > start else min(start + PANEL, ends[-1])
        spans = [
            (max(start, last - count), min(stop, last), last - count) for count, last in zip(outputs, ends, strict=True)
        ]
        yield [(index, low - first, high - first) for index, (low, high, first) in enumerate(spans) if low < high]
        start = stop


def _take_the_same_rows(blocks: Sequence[Blocks | None]) -> bool:
    """Whether the inputs of all outputs are in the same order; plain numbers, None here, have none of their own."""
    orders = [None if one is None else one.input_order for one in blocks]
    first = orders[0]
    return all(order is first if order is None or first is None else torch.equal(order, first) for order in orders)
