"""A GGUF file as a checkpoint: weights stay in the file, in the blocks that they are stored in."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from model_runner.gguf.architectures import read_config, read_parameters
from model_runner.gguf.header import GgufTensor, read_gguf
from model_runner.gguf.weights import Parameter, Source, unpack
from model_runner.kernels.block_formats import BF16, BLOCK_FORMATS, F16, F32
from model_runner.models.parameters import Blocks, Matrix
from model_runner.models.safetensors_files import FileMatrix, MappedFile

_FLOATS = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Implements Matrix for rows of blocks in a file."""

    file: MappedFile
    offset: int
    """Bytes from the beginning of the file."""
    shape: tuple[int, int]
    block_format: int
    """The number of ggml's type."""
    order: Tensor | None = None
    """int32 [outputs]: the stored row of each output; None: in order."""

    def blocks(self) -> Blocks:
        outputs, row = self.shape[0], self._row_bytes
        return Blocks(self.block_format, self.file.read(self.offset, outputs * row).view(outputs, row), self.order)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        stored = self.blocks().rows
        rows = stored[start:stop] if self.order is None else stored[self.order[start:stop].long()]
        return torch.from_numpy(unpack(rows.numpy(), self.block_format))

    def drop(self, start: int, stop: int) -> None:
        if self.order is None:
            stop = min(stop, self.shape[0])
            self.file.drop(self.offset + start * self._row_bytes, (stop - start) * self._row_bytes)
        elif stop >= self.shape[0]:
            self.file.drop(self.offset, self.shape[0] * self._row_bytes)

    @property
    def _row_bytes(self) -> int:
        return BLOCK_FORMATS[self.block_format].row_bytes(self.shape[1])


class GgufCheckpoint:
    """Implements Checkpoint."""

    def __init__(self, path: Path) -> None:
        """Reads the head of the file, or of one of its parts.

        Raises:
            UnsupportedModelError: if it cannot be read.
        """
        file = read_gguf(path)
        self._tensors = file.tensors
        self._parameters: Mapping[str, Parameter] = read_parameters(file, read_config(file))
        self._files: dict[Path, MappedFile] = {}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: parameter.shape for name, parameter in self._parameters.items()}

    def tensor(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        if len(parameter.shape) > 2:
            return torch.stack([torch.cat([m.read() for m in expert]).float() for expert in self.matrices(name)])
        parts = []
        for source in parameter.sources:
            tensor = self._tensors[source.name]
            rows = self._matrix(tensor, source, 0, math.prod(tensor.shape[:-1])).read()
            rows = rows.reshape(-1)[_order(source, tensor.size).long()] if _is_permuted_vector(source, tensor) else rows
            parts.append(rows.float() - 1 if source.minus_one else rows)
        # Each expert has the biases of gate and up; all else is rows, one after the other.
        return torch.cat(parts, 1 if name.endswith("_proj_bias") else 0).reshape(parameter.shape)

    def matrices(self, name: str) -> Sequence[Sequence[Matrix]]:
        parameter = self._parameters[name]
        num_experts = parameter.shape[0] if len(parameter.shape) == 3 else 1
        experts = range(num_experts)
        return [[self._part(source, expert, num_experts) for source in parameter.sources] for expert in experts]

    def _part(self, source: Source, expert: int, num_experts: int) -> Matrix:
        """The rows of one expert of a tensor, or of the whole tensor."""
        tensor = self._tensors[source.name]
        rows = math.prod(tensor.shape[:-1]) // num_experts
        return self._matrix(tensor, source, expert * rows, rows)

    def _matrix(self, tensor: GgufTensor, source: Source, start: int, rows: int) -> Matrix:
        if tensor.file not in self._files:
            self._files[tensor.file] = MappedFile(tensor.file)
        file, width = self._files[tensor.file], tensor.shape[-1] if tensor.shape else 1
        offset = tensor.offset + start * BLOCK_FORMATS[tensor.block_format].row_bytes(width)
        dtype = _FLOATS.get(tensor.block_format)
        if dtype is not None and (not source.halves or len(tensor.shape) < 2):
            return FileMatrix(file, offset, (rows, width), dtype)
        order = _order(source, rows) if source.halves else None
        return BlockMatrix(file, offset, (rows, width), tensor.block_format, order)


def _is_permuted_vector(source: Source, tensor: GgufTensor) -> bool:
    return bool(source.halves) and len(tensor.shape) == 1


def _order(source: Source, rows: int) -> Tensor:
    """int32 [rows]: the stored row of each output. Rows 2i and 2i + 1 of a head become rows i and i + half."""
    stored = torch.arange(rows, dtype=torch.int32).view(source.halves, -1, 2)
    return stored.transpose(1, 2).reshape(rows)
