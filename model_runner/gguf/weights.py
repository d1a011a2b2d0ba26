"""How the weights of a GGUF file are stored: formats, and the parameters that they become. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from model_runner.gguf.header import GgufFile, GgufTensor
from model_runner.kernels.block_formats import BLOCK_FORMATS, unpack
from model_runner.refusal import UnsupportedModelError, few

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the file, as a part of a parameter."""

    name: str
    order: Array | None = None
    """[rows] the stored row of each row; None: in order."""
    input_order: Array | None = None
    """[columns] the input of each stored column; None: in order."""
    values: Callable[[Array], Array] | None = None
    """Makes the parameter's numbers of the stored ones, in float32; None: they are the same."""
    part: int | None = None
    """Index of the part that becomes the parameter, of a tensor that is a stack of parameters."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model: rows of one or more tensors, of each expert in turn if there are experts."""

    sources: tuple[Source, ...]
    shape: tuple[int, ...]
    combine: Callable[[Sequence[Array]], Array] | None = None
    """Makes the parameter of whole tensors in float32, where they are not its rows."""


def check_formats(file: GgufFile) -> None:
    """Raise UnsupportedModelError unless every tensor is in a format that can be unpacked, and whole in its file."""
    formats = {tensor.block_format for tensor in file.tensors.values()}
    if unknown := sorted(formats - BLOCK_FORMATS.keys()):
        names = [name for name, tensor in file.tensors.items() if tensor.block_format == unknown[0]]
        raise UnsupportedModelError(f"it has tensors in a block format that is not known ({unknown[0]}): {few(names)}")
    sizes = {part: part.stat().st_size for part in {tensor.file for tensor in file.tensors.values()}}
    for name, tensor in file.tensors.items():
        stored = BLOCK_FORMATS[tensor.block_format]
        if (tensor.shape[-1] if tensor.shape else 1) % stored.weights:
            raise UnsupportedModelError(f"the rows of its tensor {name} are no whole blocks: {list(tensor.shape)}")
        if (end := tensor.offset + stored.row_bytes(tensor.size)) > sizes[tensor.file]:
            raise UnsupportedModelError(
                f"{tensor.file.name} ends before the weights of {name} do: it has {sizes[tensor.file]:,} bytes, and "
                f"needs {end:,}; download it again"
            )


def read_tensor(tensor: GgufTensor) -> Array:
    """A whole tensor in float32. For small ones."""
    size = BLOCK_FORMATS[tensor.block_format].row_bytes(tensor.size)
    stored = np.fromfile(tensor.file, np.uint8, size, offset=tensor.offset)
    return unpack(stored[None], tensor.block_format).reshape(tensor.shape)
