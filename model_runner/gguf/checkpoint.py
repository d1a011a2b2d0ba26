"""A GGUF file as a checkpoint: weights stay in the file, in the blocks that they are stored in."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from model_runner.gguf.architectures import architecture_of, read_config
from model_runner.gguf.header import read_gguf
from model_runner.gguf.parameters import read_parameters
from model_runner.gguf.weights import Parameter, Source
from model_runner.kernels.block_formats import BF16, BLOCK_FORMATS, F16, F32
from model_runner.weights.matrix import BlockMatrix, Blocks, DenseMatrix, Matrix
from model_runner.weights.safetensors_files import FileMatrix, MappedFile

_FLOATS = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}


class GgufCheckpoint:
    """Implements Checkpoint."""

    def __init__(self, path: Path) -> None:
        """Reads the head of the file, or of one of its parts.

        Raises:
            UnsupportedModelError: if it cannot be read.
        """
        file = read_gguf(path, has_texts=False)
        self._tensors = file.tensors
        parameters = read_parameters(file, architecture_of(file), read_config(file))
        self._parameters: Mapping[str, Parameter] = parameters
        self._files: dict[Path, MappedFile] = {}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: parameter.shape for name, parameter in self._parameters.items()}

    def tensor(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        if parameter.combine is not None:
            sources = [self._whole(source).float().numpy() for source in parameter.sources]
            return torch.from_numpy(parameter.combine(sources))
        if self._num_experts(parameter) is not None:
            whole = torch.empty(parameter.shape)
            for expert, matrices in zip(whole, self.matrices(name), strict=True):
                for rows, matrix in zip(expert.split([one.shape[0] for one in matrices]), matrices, strict=True):
                    rows.copy_(matrix.read())
            return whole
        parts = [self._whole(source) for source in parameter.sources]
        # Each expert has the biases of gate and up; all else is rows, one after the other.
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1 if name.endswith("_proj_bias") else 0)
        return whole.reshape(parameter.shape)

    def matrices(self, name: str) -> Sequence[Sequence[Matrix]]:
        parameter = self._parameters[name]
        if parameter.combine is not None:
            return [[DenseMatrix(self.tensor(name))]]
        experts = self._num_experts(parameter)
        parts = range(experts) if experts is not None else [None]
        return [[self._matrix(source, part) for source in parameter.sources] for part in parts]

    def _num_experts(self, parameter: Parameter) -> int | None:
        """The number of experts that a parameter has matrices of; None for other parameters."""
        source = parameter.sources[0]
        shape = self._tensors[source.name].shape
        return shape[0] if len(shape) == 3 and source.part is None else None

    def _whole(self, source: Source) -> Tensor:
        """A tensor, or its part that becomes a parameter, in the parameter's order."""
        tensor = self._tensors[source.name]
        if len(tensor.shape) < 2:
            values = self._matrix(replace(source, order=None)).read().reshape(-1)
            values = values if source.order is None else values[torch.from_numpy(source.order)]
        else:
            values = self._matrix(source).read().reshape(tensor.shape if source.part is None else tensor.shape[1:])
        return values if source.values is None else torch.from_numpy(source.values(values.float().numpy()))

    def _matrix(self, source: Source, part: int | None = None) -> Matrix:
        """The rows of a tensor, or of a part of it."""
        tensor = self._tensors[source.name]
        part = source.part if part is None else part
        rows, width = math.prod(tensor.shape[:-1]), tensor.shape[-1] if tensor.shape else 1
        rows = rows if part is None else rows // tensor.shape[0]
        if tensor.file not in self._files:
            self._files[tensor.file] = MappedFile(tensor.file)
        file, row_bytes = self._files[tensor.file], BLOCK_FORMATS[tensor.block_format].row_bytes(width)
        offset = tensor.offset + (part or 0) * rows * row_bytes
        dtype = _FLOATS.get(tensor.block_format)
        if dtype is not None and source.order is None and source.input_order is None:
            return FileMatrix(file, offset, (rows, width), dtype)
        order, input_order = (
            None if one is None else torch.from_numpy(one).int() for one in (source.order, source.input_order)
        )
        stored = FileMatrix(file, offset, (rows, row_bytes), torch.uint8)

        def load() -> Blocks:
            return Blocks(tensor.block_format, stored.read(), order, input_order=input_order)

        return BlockMatrix((rows, width), tensor.block_format, load, [stored])
