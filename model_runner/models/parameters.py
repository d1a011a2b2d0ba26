"""Weights of a model by the names of transformers' modules, read when they are needed.

A checkpoint may hold more than memory does in float32, so that a matrix is a place in a file until its rows are read.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from model_runner.kernels.block_formats import unpack
from model_runner.models.refusal import UnsupportedModelError, few


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a weight in the blocks that a checkpoint stores them in."""

    block_format: int
    """A number of `kernels.block_formats`."""
    rows: Tensor  # [n, bytes of a row] uint8, which may be a mapping of a file
    order: Tensor | None = None
    """[outputs] int32: the row of each output; None: in order."""
    output_scales: Tensor | None = None
    """[outputs] float32: factors of the blocks' values."""
    input_order: Tensor | None = None
    """[inputs] int32: the input of each column; None: in order."""

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Outputs [start, stop) in float32, with their inputs in order."""
        rows = self.rows[start:stop] if self.order is None else self.rows[self.order[start:stop].long()]
        values = torch.from_numpy(unpack(rows.numpy(), self.block_format))
        if self.output_scales is not None:
            values = values * self.output_scales[start:stop, None]
        return values if self.input_order is None else values[:, self.input_order.long().argsort()]


class Matrix(Protocol):
    """A weight [outputs, inputs] that may still be in a file."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        ...

    @property
    def block_format(self) -> int | None:
        """The format of the blocks that hold the weight; None for plain numbers."""
        ...

    def blocks(self) -> Blocks | None:
        """All rows in blocks; None if the weight has none."""
        ...

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) in a float type; `stop` may be beyond the last row."""
        ...

    def drop(self, start: int, stop: int) -> None:
        """Return the memory of rows that were read to the system; they can be read again."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """Implements Matrix for a tensor [outputs, inputs], which may be a mapping of a file."""

    tensor: Tensor
    block_format = None

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.tensor.shape
        return outputs, inputs

    def blocks(self) -> None:
        """There are none."""

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.tensor[start:stop]

    def drop(self, start: int, stop: int) -> None:
        """Nothing to do: the tensor stays."""


@dataclass(slots=True)
class BlockMatrix:
    """Implements Matrix for blocks that are read as a whole, and kept until their last row is dropped."""

    shape: tuple[int, int]
    block_format: int
    load: Callable[[], Blocks]
    sources: Sequence[Matrix] = ()
    """Matrices with the same rows that the blocks are read from."""
    _kept: Blocks | None = None

    def blocks(self) -> Blocks:
        if self._kept is None:
            self._kept = self.load()
        return self._kept

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.blocks().dense(start, stop)

    def drop(self, start: int, stop: int) -> None:
        is_ordered, is_last = self._kept is not None and self._kept.order is not None, stop >= self.shape[0]
        for source in self.sources:
            if is_last or not is_ordered:
                source.drop(0 if is_ordered else start, stop)
        if is_last:
            self._kept = None


class Checkpoint(Protocol):
    """The tensors of a model."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by name."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in a float type. For small ones."""
        ...

    def matrices(self, name: str) -> Sequence[Sequence[Matrix]]:
        """A tensor [outputs, inputs], or one [experts, outputs, inputs]: its experts, each as matrices to stack.

        Further dimensions, as of blocks, are parts of the inputs.
        """
        ...


class TensorCheckpoint:
    """Implements Checkpoint for tensors in memory, or mapped from files."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def matrices(self, name: str) -> Sequence[Sequence[Matrix]]:
        tensor = self._tensors[name]
        return [[DenseMatrix(matrix)] for matrix in (tensor.flatten(2) if tensor.dim() > 2 else [tensor])]


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor of a model that a checkpoint stores in another form."""

    shape: tuple[int, ...]
    matrices: Callable[[], Sequence[Sequence[Matrix]]]
    """Returns what `Checkpoint.matrices` does, with one matrix for each expert."""


class DerivedCheckpoint:
    """Implements Checkpoint on another, of whose tensors some stand for tensors of the model."""

    def __init__(self, stored: Checkpoint, made: Mapping[str, MadeTensor], parts: Collection[str]) -> None:
        """Takes the tensors that are made, by name, and the names of the stored ones that they are made of."""
        self._stored = stored
        self._made = made
        own = {name: shape for name, shape in stored.shapes.items() if name not in parts}
        self.shapes = {**own, **{name: tensor.shape for name, tensor in made.items()}}

    def tensor(self, name: str) -> Tensor:
        if (made := self._made.get(name)) is None:
            return self._stored.tensor(name)
        parts = [matrix.read() for (matrix,) in made.matrices()]
        return torch.stack(parts) if len(made.shape) > 2 else parts[0]

    def matrices(self, name: str) -> Sequence[Sequence[Matrix]]:
        made = self._made.get(name)
        return self._stored.matrices(name) if made is None else made.matrices()


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer."""

    matrices: Sequence[Matrix]
    """Their outputs follow one another; all have the same inputs."""
    bias: Tensor | None = None  # [outputs]

    @property
    def outputs(self) -> int:
        """Width of the result."""
        return sum(matrix.shape[0] for matrix in self.matrices)

    @property
    def inputs(self) -> int:
        """Width of the input."""
        return self.matrices[0].shape[1]

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs] in memory; a copy if there are several matrices."""
        rows = [matrix.read() for matrix in self.matrices]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


@dataclass(frozen=True, slots=True)
class DerivedMatrix:
    """Implements Matrix for outputs of another, in an order of their own or multiplied by factors."""

    stored: Matrix
    order: Tensor | None = None
    """[outputs] int32: the stored output of each; None: all in order."""
    factors: Tensor | None = None
    """[outputs] float32."""

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.stored.shape
        return outputs if self.order is None else len(self.order), inputs

    @property
    def block_format(self) -> int | None:
        return self.stored.block_format

    def blocks(self) -> Blocks | None:
        blocks = self.stored.blocks()
        if blocks is None:
            return None
        order, scales = blocks.order, blocks.output_scales
        if self.order is not None:
            chosen = self.order.long()
            order = self.order if order is None else order[chosen].contiguous()
            scales = None if scales is None else scales[chosen].contiguous()
        if self.factors is not None:
            scales = self.factors if scales is None else scales * self.factors
        return replace(blocks, order=order, output_scales=scales)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        order, factors = self.order, self.factors
        rows = self.stored.read(start, stop) if order is None else self.stored.read()[order[start:stop].long()]
        return rows if factors is None else rows.float() * factors[start:stop, None]

    def drop(self, start: int, stop: int) -> None:
        if self.order is None:
            self.stored.drop(start, stop)
        elif stop >= self.shape[0]:
            self.stored.drop(0, self.stored.shape[0])


def scaled(linear: Linear, factors: Tensor, of_inputs: float = 1.0) -> Linear:
    """A linear layer whose outputs are multiplied by factors [outputs], and whose inputs by `of_inputs`."""
    is_faulty = len(factors) != linear.outputs  # which is noted
    if is_faulty or (of_inputs == 1 and bool((factors == 1).all())):
        return linear
    parts = torch.split(factors, [matrix.shape[0] for matrix in linear.matrices])
    matrices = [DerivedMatrix(one, factors=part * of_inputs) for one, part in zip(linear.matrices, parts, strict=True)]
    return Linear(matrices, None if linear.bias is None else linear.bias.float() * factors)


def in_order(linear: Linear, order: Tensor) -> Linear:
    """The outputs at indices `order` [outputs] of a linear layer of one matrix, in this order."""
    (matrix,) = linear.matrices
    return Linear([DerivedMatrix(matrix, order.int())], None if linear.bias is None else linear.bias[order])


def joined(linears: Sequence[Linear]) -> Linear:
    """The outputs of linear layers, one after the other. Where some have no bias, it is zero."""
    biases = [torch.zeros(one.outputs) if one.bias is None else one.bias for one in linears]
    has_bias = any(one.bias is not None for one in linears)
    return Linear([matrix for one in linears for matrix in one.matrices], torch.cat(biases) if has_bias else None)


@dataclass(frozen=True, slots=True)
class StoredNames:
    """How checkpoints name weights that modules hold under other names."""

    parts: Sequence[tuple[str, str]] = ()
    """Parts of modules' names, and what checkpoints may have in their places; some or all of them, in this order."""
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down of one expert, for checkpoints with a tensor for each."""


SAME_NAMES = StoredNames()
_UP_AND_DOWN = "up_proj", "down_proj"
"""The weights of one expert without a gate, for checkpoints with a tensor for each."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The weights of a model, or of a part of it, which records what was looked for."""

    checkpoint: Checkpoint
    names: StoredNames = SAME_NAMES
    prefix: str = ""
    used: set[str] = field(default_factory=set)
    """Tensors of the checkpoint that became a part of the model."""
    missing: set[str] = field(default_factory=set)
    """Names that the model needs and the checkpoint does not have."""
    mismatched: list[str] = field(default_factory=list)
    """Descriptions of tensors whose shapes do not fit the model."""

    def below(self, path: str) -> "Parameters":
        """The weights of a submodule."""
        prefix = f"{self.prefix}{path}."
        return Parameters(self.checkpoint, self.names, prefix, self.used, self.missing, self.mismatched)

    def has(self, name: str) -> bool:
        """Whether there is such a weight."""
        return self._find(name) is not None

    def tensor(self, name: str, *shape: int) -> Tensor | None:
        """A small weight, of this shape if one is given; None if there is none."""
        stored = self._find(name)
        if stored is None:
            return None
        self.used.add(stored)
        tensor = self.checkpoint.tensor(stored)
        if shape and tuple(tensor.shape) != shape:
            self.mismatched.append(f"{stored} {list(tensor.shape)} instead of {list(shape)}")
        return tensor

    def require(self, name: str, *shape: int) -> Tensor:
        """A small weight of this shape; zeros, and a note in `missing`, if there is none."""
        tensor = self.tensor(name, *shape)
        if tensor is None:
            self.missing.add(self.prefix + name)
            return torch.zeros(shape)
        return tensor

    def require_joined(self, names: Sequence[str], *shape: int) -> Tensor:
        """As `require`, of weights that follow one another in the first dimension."""
        if len(names) == 1:
            return self.require(names[0], *shape)
        self.missing.update(self.prefix + name for name in names if not self.has(name))
        parts = [part for name in names if (part := self.tensor(name)) is not None]
        if all(part.shape[1:] == shape[1:] for part in parts) and sum(map(len, parts)) == shape[0]:
            return torch.cat(parts)
        if len(parts) == len(names):
            self.mismatched.append(f"{self.prefix}{' and '.join(names)}")
        return torch.zeros(shape)

    def linear(self, paths: Sequence[str], outputs: int | None, inputs: int) -> Linear:
        """The linear layers at these paths as one, of this shape; None: any even number of outputs."""
        matrices: list[Matrix] = []
        biases: list[Tensor] = []
        for path in paths:
            stored = self._find(f"{path}.weight")
            if stored is None:
                self.missing.add(f"{self.prefix}{path}.weight")
                return _missing_linear(outputs or 0, inputs)
            self.used.add(stored)
            own = self.checkpoint.matrices(stored)[0]
            matrices += own
            if (bias := self.tensor(f"{path}.bias")) is not None:
                biases.append(bias)
        linear = Linear(matrices, torch.cat(biases) if biases else None)
        name = self.prefix + " and ".join(paths)
        self._check(name, linear, outputs, inputs)
        if linear.bias is not None and len(linear.bias) != linear.outputs:
            self.mismatched.append(f"{name} with a bias for some of its outputs only")
        return linear

    def experts(
        self, path: str, count: int, hidden: int, *, has_gate: bool = True
    ) -> tuple[list[Linear], list[Linear]]:
        """Gate and up, or up alone without a gate, and down, of each expert of the module at this path."""
        first, names, gates = ("gate_up_proj", self.names.expert, 2) if has_gate else ("up_proj", _UP_AND_DOWN, 1)
        gate_up, down = self._experts(f"{path}.{first}", count), self._experts(f"{path}.down_proj", count)
        if gate_up is None or down is None:
            *inner, last = names
            gate_up = [self.linear([f"{path}.{i}.{name}" for name in inner], None, hidden) for i in range(count)]
            down = [self.linear([f"{path}.{i}.{last}"], hidden, gate_up[i].outputs // gates) for i in range(count)]
        for one, other in zip(gate_up, down, strict=False):
            self._check(f"{self.prefix}{path}.{first}", one, gate_up[0].outputs, hidden)
            self._check(f"{self.prefix}{path}.down_proj", other, hidden, gate_up[0].outputs // gates)
        return gate_up, down

    def fault(self) -> str | None:
        """The reason why the checkpoint does not fit the model; None if every tensor is used, and none is missing."""
        unused = set(self.checkpoint.shapes) - self.used
        faults = (
            ("has no weights", self.missing),
            ("has weights of another shape", self.mismatched),
            ("has weights that the model does not use", unused),
        )
        return "; and ".join(f"{fault}: {few(names)}" for fault, names in faults if names) or None

    def _experts(self, name: str, count: int) -> list[Linear] | None:
        stored = self._find(name)
        if stored is None:
            return None
        self.used.add(stored)
        experts = self.checkpoint.matrices(stored)
        if len(experts) != count:
            self.mismatched.append(f"{stored} has {len(experts)} experts instead of {count}")
        biases = self.tensor(f"{name}_bias", len(experts), sum(matrix.shape[0] for matrix in experts[0]))
        return [Linear(matrices, None if biases is None else biases[i]) for i, matrices in enumerate(experts)]

    def _find(self, name: str) -> str | None:
        """The checkpoint's name of a weight."""
        names = [self.prefix + name]
        for own, stored in self.names.parts:
            names += [one.replace(own, stored) for one in names if own in one]
        return next((one for one in names if one in self.checkpoint.shapes), None)

    def _check(self, name: str, linear: Linear, outputs: int | None, inputs: int) -> None:
        """Note a linear layer whose weight has another shape."""
        shape, wanted = [linear.outputs, linear.inputs], [linear.outputs if outputs is None else outputs, inputs]
        if shape != wanted or (outputs is None and linear.outputs % 2):
            self.mismatched.append(f"{name} {shape} instead of {wanted}")


def _missing_linear(outputs: int, inputs: int) -> Linear:
    """Stands for a layer whose absence is noted, until all notes become an error."""
    return Linear([DenseMatrix(torch.empty(outputs, inputs, device="meta"))])


def require_faultless(parameters: Parameters, what: str) -> None:
    """Raises UnsupportedModelError if the checkpoint lacks weights, or has others than the model."""
    if (fault := parameters.fault()) is not None:
        raise UnsupportedModelError(f"{what} {fault}")
