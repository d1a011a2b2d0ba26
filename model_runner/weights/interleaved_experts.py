"""The experts of gpt-oss as other families store theirs: gate first, outputs before inputs.

Checkpoints store gate_up as [experts, hidden, 2 * intermediate], where outputs of gate and up alternate; or each weight
in MXFP4, as blocks [experts, outputs, inputs / 32, 16] uint8 with scales [experts, outputs, inputs / 32] uint8.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from model_runner.weights.checkpoint import Checkpoint, DerivedCheckpoint, MadeTensor
from model_runner.weights.matrix import BlockMatrix, Blocks, DenseMatrix, Matrix

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
    if not any(name.endswith((f"{_GATE_UP}{_BLOCKS}", f"{_GATE_UP}{_BIAS}")) for name in stored.shapes):
        return stored
    made: dict[str, MadeTensor] = {}
    parts: set[str] = set()
    for name, shape in stored.shapes.items():
        weight = name.removesuffix(_BLOCKS)
        if weight != name and weight.endswith(_WEIGHTS):
            parts |= {name, f"{weight}{_SCALES}"}
            made[weight] = MadeTensor((*shape[:2], shape[2] * _BLOCK), partial(_in_mxfp4, stored, weight))
        elif name.endswith(_WEIGHTS):
            experts, inputs, outputs = shape
            made[name] = MadeTensor((experts, outputs, inputs), partial(_transposed, stored, name))
        elif name.endswith(f"{_GATE_UP}{_BIAS}"):
            made[name] = MadeTensor(shape, partial(_bias, stored, name))
    return DerivedCheckpoint(stored, made, parts)


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


def _order(name: str, outputs: int) -> Tensor | None:
    """int32 [outputs]: the stored output of each of a weight's; None: they are in order."""
    return _gate_first(outputs).int() if name.endswith(_GATE_UP) else None


def _transposed(stored: Checkpoint, name: str) -> list[list[Matrix]]:
    order = _order(name, stored.shapes[name][2])
    return [[TransposedMatrix(matrix, order)] for (matrix,) in stored.matrices(name)]


def _bias(stored: Checkpoint, name: str) -> list[list[Matrix]]:
    tensor = stored.tensor(name)
    return [[DenseMatrix(tensor[:, _gate_first(tensor.shape[1])])]]


def _in_mxfp4(stored: Checkpoint, name: str) -> list[list[Matrix]]:
    parts = (stored.matrices(f"{name}{part}") for part in (_BLOCKS, _SCALES))
    order = _order(name, stored.shapes[f"{name}{_BLOCKS}"][1])
    return [[_mxfp4_matrix(pairs, scales, order)] for (pairs,), (scales,) in zip(*parts, strict=True)]


def _mxfp4_matrix(pairs: Matrix, scales: Matrix, order: Tensor | None) -> BlockMatrix:
    """Takes pairs [outputs, inputs / 2] and scales [outputs, inputs / 32]; `order` as in Blocks."""
    outputs = pairs.shape[0]

    def load() -> Blocks:
        stored = pairs.read().view(outputs, -1, _BLOCK // 2)
        in_order = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)  # byte j has weights 2j and 2j + 1
        first, second = in_order.chunk(2, dim=-1)
        rows = torch.cat((scales.read().unsqueeze(-1), first | second << 4), dim=-1).flatten(1)
        return Blocks(_MXFP4, rows, order)

    return BlockMatrix((outputs, 2 * pairs.shape[1]), _MXFP4, load, (pairs, scales))
