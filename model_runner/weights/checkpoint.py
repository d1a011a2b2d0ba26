"""The tensors of a model by name, wherever they are stored."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_runner.weights.matrix import DenseMatrix, Matrix


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
