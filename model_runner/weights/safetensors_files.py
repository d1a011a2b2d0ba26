"""Safetensors files as a checkpoint whose weights stay in the files until they are read."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from model_runner.refusal import UnsupportedModelError
from model_runner.weights.matrix import Matrix
from model_runner.weights.safetensors_head import read_safetensors_head, weight_files

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class MappedFile:
    """A file whose pages are read when they are needed, and can be dropped again."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be read, ValueError if it is empty."""
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers of a type, without a copy if they are aligned. They must not be changed."""
        stored = self._bytes[offset : offset + math.prod(shape) * dtype.itemsize]
        if stored.data_ptr() % dtype.itemsize:
            stored = stored.clone()
        return stored.view(dtype).view(tuple(shape))

    def drop(self, offset: int, size: int) -> None:
        """Return the memory of these bytes to the system, until they are read again."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)


@dataclass(frozen=True, slots=True)
class FileMatrix:
    """Implements Matrix for rows of one type in a file."""

    file: MappedFile
    offset: int
    """Bytes from the beginning of the file."""
    shape: tuple[int, int]
    dtype: torch.dtype
    block_format: None = None

    def blocks(self) -> None:
        """There are none."""

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        outputs, inputs = self.shape
        stop = outputs if stop is None else min(stop, outputs)
        offset = self.offset + start * inputs * self.dtype.itemsize
        return self.file.tensor(offset, (stop - start, inputs), self.dtype)

    def drop(self, start: int, stop: int) -> None:
        row = self.shape[1] * self.dtype.itemsize
        self.file.drop(self.offset + start * row, (min(stop, self.shape[0]) - start) * row)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file."""

    file: MappedFile
    offset: int
    """Bytes from the beginning of the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsCheckpoint:
    """Implements Checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Raises UnsupportedModelError if the folder has no safetensors files, or they are damaged."""
        self.tensors: dict[str, StoredTensor] = {}
        for path in weight_files(folder):
            self.tensors |= _read_header(path)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self.tensors.items()}

    def tensor(self, name: str) -> Tensor:
        stored = self.tensors[name]
        copied = stored.file.tensor(stored.offset, stored.shape, stored.dtype).clone()
        stored.file.drop(stored.offset, copied.nbytes)
        return copied

    def matrices(self, name: str) -> Sequence[Sequence[Matrix]]:
        stored = self.tensors[name]
        *leading, outputs, inputs = stored.shape
        if len(leading) > 1:  # blocks of experts
            leading, outputs, inputs = leading[:1], leading[1], outputs * inputs
        step = outputs * inputs * stored.dtype.itemsize
        return [
            [FileMatrix(stored.file, stored.offset + expert * step, (outputs, inputs), stored.dtype)]
            for expert in range(leading[0] if leading else 1)
        ]


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file."""
    head, start = read_safetensors_head(path)
    if unknown := {entry["dtype"] for entry in head.values()} - _TYPES.keys():
        raise UnsupportedModelError(f"{path} has tensors of the type {min(unknown)}, which is not supported")
    try:
        file = MappedFile(path)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path} cannot be mapped ({error})") from error
    return {
        name: StoredTensor(file, start + entry["data_offsets"][0], tuple(entry["shape"]), _TYPES[entry["dtype"]])
        for name, entry in head.items()
    }
