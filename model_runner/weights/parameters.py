"""Weights of a model by the names of transformers' modules, which record what was looked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_runner.refusal import UnsupportedModelError, few
from model_runner.weights.checkpoint import Checkpoint
from model_runner.weights.matrix import DenseMatrix, Linear, Matrix


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
        of_each: list[str] = []
        for path in paths:
            stored = self._find(f"{path}.weight")
            if stored is None:
                self.missing.add(f"{self.prefix}{path}.weight")
                return _missing_linear(outputs or 0, inputs)
            self.used.add(stored)
            own = self.checkpoint.matrices(stored)[0]
            matrices += own
            of_each += [self.prefix + path] * len(own)
            if (bias := self.tensor(f"{path}.bias")) is not None:
                biases.append(bias)
        linear = Linear(matrices, torch.cat(biases) if biases else None, of_each)
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
        return [
            Linear(matrices, None if biases is None else biases[i], [f"{self.prefix}{name}.{i}"] * len(matrices))
            for i, matrices in enumerate(experts)
        ]

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
