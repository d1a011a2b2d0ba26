"""Weights of a GGUF file, unpacked block by block, and written as safetensors with memory for one slab of rows."""

import errno
import json
import math
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from model_runner.gguf.header import GgufFile, GgufTensor
from model_runner.models.refusal import UnsupportedModelError, few

Array = npt.NDArray[Any]

_SLAB = 1 << 24
"""Weights that are unpacked at once; unless one row has more."""
_MIN_SIZE = 8
"""Bytes of the size that a safetensors file begins with, and what its header is padded to."""
_AS_STORED = {GGMLQuantizationType.F16: "F16", GGMLQuantizationType.BF16: "BF16"}
"""Formats that safetensors has too; all others are unpacked to float32."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the file, as a part of a parameter."""

    name: str
    halves: int = 0
    """Heads whose rows are stored as neighbouring pairs, and become halves: the way of rotary positions differs."""
    minus_one: bool = False
    """The file has the factor of a norm, and the parameter is what is added to one."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model: rows of one or more tensors, of each expert in turn if there are experts."""

    sources: tuple[Source, ...]
    shape: tuple[int, ...]


def check_formats(file: GgufFile) -> None:
    """Raise UnsupportedModelError unless every tensor is in a format that can be unpacked, and whole in its file."""
    formats = {tensor.block_format for tensor in file.tensors.values()}
    if unknown := sorted(number for number in formats if not _can_unpack(number)):
        names = [name for name, tensor in file.tensors.items() if tensor.block_format == unknown[0]]
        raise UnsupportedModelError(f"it has tensors in a block format that is not known ({unknown[0]}): {few(names)}")
    sizes = {part: part.stat().st_size for part in {tensor.file for tensor in file.tensors.values()}}
    for name, tensor in file.tensors.items():
        if tensor.shape and tensor.shape[-1] % _block(tensor)[0]:
            raise UnsupportedModelError(f"the rows of its tensor {name} are no whole blocks: {list(tensor.shape)}")
        if (end := tensor.offset + _num_bytes(tensor)) > sizes[tensor.file]:
            raise UnsupportedModelError(
                f"{tensor.file.name} ends before the weights of {name} do: it has {sizes[tensor.file]:,} bytes, and "
                f"needs {end:,}; download it again"
            )


def read_tensor(tensor: GgufTensor) -> Array:
    """A whole tensor in float32. For small ones."""
    rows = list(_WeightReader().rows(tensor))
    return np.concatenate(rows).reshape(tensor.shape)


def write_safetensors(file: GgufFile, parameters: Mapping[str, Parameter], path: Path) -> None:
    """Write parameters by their names, each in the type that it is stored in, or in float32."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, parameter in parameters.items():
        kind = _kind(file, parameter)
        end = at + math.prod(parameter.shape) * (4 if kind == "F32" else 2)
        header[name] = {"dtype": kind, "shape": parameter.shape, "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _MIN_SIZE)
    if (free := shutil.disk_usage(path.parent).free) < at:
        raise OSError(
            errno.ENOSPC,
            f"{at:,} bytes are needed in {path.parent}, and {free:,} are free; name another folder in SAMEWISE_CACHE",
        )
    reader = _WeightReader()
    with path.open("wb") as output:
        output.write(struct.pack("<Q", len(encoded)) + encoded)
        for parameter in parameters.values():
            for rows in _slabs(reader, file, parameter):
                output.write(rows.data)


def _slabs(reader: "_WeightReader", file: GgufFile, parameter: Parameter) -> Iterator[Array]:
    """The parameter's content in order."""
    tensors = [(source, file.tensors[source.name]) for source in parameter.sources]
    keeps = _kind(file, parameter) != "F32"
    num_experts = tensors[0][1].shape[0] if len(tensors[0][1].shape) == 3 else 1
    for expert in range(num_experts):
        for source, tensor in tensors:
            rows = math.prod(tensor.shape[:-1]) // num_experts
            for slab in reader.rows(tensor, expert * rows, rows, whole=bool(source.halves), keeps=keeps):
                yield np.ascontiguousarray(_as_parameter(slab, source, len(tensor.shape)))


def _as_parameter(rows: Array, source: Source, num_dimensions: int) -> Array:
    """Rows [n, width] of a tensor, or the only one of a vector, as the parameter has them."""
    if source.halves:
        # Rows 2i and 2i + 1 of a head are a pair; they become rows i and i + half.
        heads = rows.reshape(source.halves, -1, 2, rows.shape[-1] if num_dimensions > 1 else 1)
        return heads.swapaxes(1, 2).reshape(rows.shape)
    return rows - 1 if source.minus_one else rows


def _kind(file: GgufFile, parameter: Parameter) -> str:
    """The type in safetensors."""
    formats = {file.tensors[source.name].block_format for source in parameter.sources}
    changes = any(source.minus_one for source in parameter.sources)
    if len(formats) > 1 or changes:
        return "F32"
    return _AS_STORED.get(GGMLQuantizationType(formats.pop()), "F32")


def _can_unpack(number: int) -> bool:
    """Tried with one block."""
    try:
        kind = GGMLQuantizationType(number)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return False
    return True


def _block(tensor: GgufTensor) -> tuple[int, int]:
    """Weights and bytes of a block."""
    sizes: tuple[int, int] = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.block_format)]
    return sizes


def _num_bytes(tensor: GgufTensor) -> int:
    weights, num_bytes = _block(tensor)
    return tensor.size // weights * num_bytes


class _WeightReader:
    """Maps each file once, and unpacks slabs of rows."""

    def __init__(self) -> None:
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}

    def rows(
        self, tensor: GgufTensor, start: int = 0, count: int | None = None, *, whole: bool = False, keeps: bool = False
    ) -> Iterator[Array]:
        """Rows [n, width] from `start` on, in slabs, or all at once.

        Args:
            tensor: whose outer dimensions count as one.
            start: the first row.
            count: of rows; all that follow where it is None.
            whole: as one slab.
            keeps: half precision is not widened to float32.
        """
        width = tensor.shape[-1] if tensor.shape else 1
        end = tensor.size // max(width, 1) if count is None else start + count
        weights, block_bytes = _block(tensor)
        row_bytes = width // weights * block_bytes
        step = end - start if whole else max(_SLAB // max(width, 1), 1)
        content = self._content(tensor.file)
        for row in range(start, end, max(step, 1)):
            num = min(step, end - row)
            at = tensor.offset + row * row_bytes
            yield self._unpacked(content[at : at + num * row_bytes].reshape(num, row_bytes), tensor, keeps=keeps)

    def _unpacked(self, rows: npt.NDArray[np.uint8], tensor: GgufTensor, *, keeps: bool) -> Array:
        kind = GGMLQuantizationType(tensor.block_format)
        if keeps:
            return rows.view(np.uint16)
        unpacked: Array = dequantize(rows, kind)
        return unpacked.astype(np.float32, copy=False)

    def _content(self, path: Path) -> npt.NDArray[np.uint8]:
        if path not in self._maps:
            self._maps[path] = np.memmap(path, np.uint8, "r")
        return self._maps[path]
