"""The experts of gpt-oss as other families store theirs: gate first, outputs before inputs.

Checkpoints store gate_up as [experts, hidden, 2 * intermediate], where outputs of gate and up alternate; or each weight
in MXFP4, as blocks [experts, outputs, inputs / 32, 16] uint8 with scales [experts, outputs, inputs / 32] uint8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from model_runner.gguf.weights import unpack
from model_runner.models.parameters import Blocks, Checkpoint, Matrix

_MXFP4 = 39
"""Block format: a scale, then 16 bytes; byte j has weight j in its lower half and weight j + 16 in its upper half."""
_BLOCK = 32
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_WEIGHTS = (_GATE_UP, _DOWN)
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"


def _gate_first(outputs: int) -> Tensor:
    """int64 [outputs]: the stored output that each output comes from."""
    return torch.arange(outputs).view(-1, 2).t().flatten()


def _alternate(tensor: Tensor) -> Tensor:
    """Outputs [..., outputs], gate first, in the order in which gate and up alternate."""
    gate, up = tensor.chunk(2, dim=-1)
    return torch.stack((gate, up), dim=-1).flatten(-2)


def deinterleave_experts(stored: Checkpoint) -> Checkpoint:
    """The checkpoint; its experts in the usual order if it stores them as gpt-oss does."""
    endings = tuple(f"{_GATE_UP}{part}" for part in (_BLOCKS, _BIAS))
    return InterleavedExperts(stored) if any(name.endswith(endings) for name in stored.shapes) else stored


def as_modules(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with the experts in the usual order, as gpt-oss's modules in transformers have them."""
    found = {}
    for name, tensor in tensors.items():
        stored = tensor.transpose(1, 2) if name.endswith(_WEIGHTS) else tensor
        alternates = name.endswith((_GATE_UP, f"{_GATE_UP}{_BIAS}"))
        found[name] = (_alternate(stored) if alternates else stored).contiguous()
    return found


@dataclass(frozen=True, slots=True)
class TransposedMatrix:
    """Implements Matrix for a weight stored as [inputs, outputs]."""

    stored: Matrix
    order: Tensor | None
    """[outputs] the stored output of each; None: in order."""
    block_format: None = None

    @property
    def shape(self) -> tuple[int, int]:
        inputs, outputs = self.stored.shape
        return outputs, inputs

    def blocks(self) -> None:
        """There are none."""

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        columns = self.stored.read()
        return (columns[:, start:stop] if self.order is None else columns[:, self.order[start:stop]]).t()

    def drop(self, start: int, stop: int) -> None:
        if stop >= self.shape[0]:
            self.stored.drop(0, self.stored.shape[0])


class Mxfp4Matrix:
    """Implements Matrix for a weight in MXFP4, which is read as a whole, and kept until its last row is dropped."""

    block_format = _MXFP4

    def __init__(self, pairs: Matrix, scales: Matrix, order: Tensor | None) -> None:
        """Takes pairs [outputs, inputs / 2] and scales [outputs, inputs / 32]; `order` as in Blocks."""
        self.shape = (pairs.shape[0], 2 * pairs.shape[1])
        self._pairs, self._scales = pairs, scales
        self._order = order
        self._kept: Tensor | None = None

    def blocks(self) -> Blocks:
        if self._kept is None:
            pairs = self._pairs.read().view(self.shape[0], -1, _BLOCK // 2)
            in_order = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)  # byte j has weights 2j and 2j + 1
            first, second = in_order.chunk(2, dim=-1)
            scales = self._scales.read().unsqueeze(-1)
            self._kept = torch.cat((scales, first | second << 4), dim=-1).flatten(1)
        return Blocks(_MXFP4, self._kept, self._order)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        blocks = self.blocks()
        rows = blocks.rows if self._order is None else blocks.rows[self._order.long()]
        return torch.from_numpy(unpack(rows[start:stop].numpy(), _MXFP4))

    def drop(self, start: int, stop: int) -> None:
        if stop >= self.shape[0]:
            self._kept = None
            for stored in (self._pairs, self._scales):
                stored.drop(0, stored.shape[0])


class InterleavedExperts:
    """Implements Checkpoint on one whose experts are stored as gpt-oss's."""

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in self._stored.shapes.items():
            if name.endswith(tuple(f"{weight}{_BLOCKS}" for weight in _WEIGHTS)):
                shapes[name.removesuffix(_BLOCKS)] = (*shape[:2], shape[2] * _BLOCK)
            elif name.endswith(_WEIGHTS):
                experts, inputs, outputs = shape
                shapes[name] = (experts, outputs, inputs)
            elif not name.endswith(tuple(f"{weight}{_SCALES}" for weight in _WEIGHTS)):
                shapes[name] = shape
        return shapes

    def tensor(self, name: str) -> Tensor:
        if name.endswith(_WEIGHTS):
            return torch.stack([matrix.read() for [matrix] in self.matrices(name)])
        tensor = self._stored.tensor(name)
        return tensor[:, _gate_first(tensor.shape[1])] if name.endswith(f"{_GATE_UP}{_BIAS}") else tensor

    def matrices(self, name: str) -> Sequence[Sequence[Matrix]]:
        if not name.endswith(_WEIGHTS):
            return self._stored.matrices(name)
        order = _gate_first(self.shapes[name][1]).int() if name.endswith(_GATE_UP) else None
        if name in self._stored.shapes:
            return [[TransposedMatrix(stored, order)] for [stored] in self._stored.matrices(name)]
        parts = (self._stored.matrices(f"{name}{part}") for part in (_BLOCKS, _SCALES))
        return [[Mxfp4Matrix(pairs, scales, order)] for [pairs], [scales] in zip(*parts, strict=True)]
