"""Weights [outputs, inputs] that may still be in a file, and linear layers of them.

A checkpoint may hold more than memory does in float32, so that a matrix is a place in a file until its rows are read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from model_runner.kernels.block_formats import unpack


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


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer."""

    matrices: Sequence[Matrix]
    """Their outputs follow one another; all have the same inputs."""
    bias: Tensor | None = None  # [outputs]
    paths: Sequence[str] = ()
    """For each matrix the path of its module, if the model is read as data: the checkpoint's prefix, and transformers'
    names behind it.

    A DerivedMatrix says which of the module's outputs they are, in which order and with which factors.
    """

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
    return Linear(matrices, None if linear.bias is None else linear.bias.float() * factors, linear.paths)


def in_order(linear: Linear, order: Tensor) -> Linear:
    """The outputs at indices `order` [outputs] of a linear layer of one matrix, in this order."""
    (matrix,) = linear.matrices
    bias = None if linear.bias is None else linear.bias[order]
    return Linear([DerivedMatrix(matrix, order.int())], bias, linear.paths)


def joined(linears: Sequence[Linear]) -> Linear:
    """The outputs of linear layers, one after the other. Where some have no bias, it is zero."""
    biases = [torch.zeros(one.outputs) if one.bias is None else one.bias for one in linears]
    has_bias = any(one.bias is not None for one in linears)
    matrices = [matrix for one in linears for matrix in one.matrices]
    paths = [path for one in linears for path in one.paths]
    return Linear(matrices, torch.cat(biases) if has_bias else None, paths)
