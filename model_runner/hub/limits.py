"""Sizes of models by the heads of their files, and checks before a download: disk, memory and architecture."""

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from model_runner.gguf.header import GgufFile, GgufTensor
from model_runner.hub.access import ModelNotFoundError
from model_runner.kernels.block_formats import BLOCK_FORMATS
from model_runner.refusal import UnsupportedModelError
from model_runner.weights.safetensors_head import BITS

_RESERVE = 1 << 26
"""Bytes of the disk that a download leaves free."""
_LEAST_BITS = 5
"""Bits of a weight in the smallest form that this server packs weights into (int4 with its scales)."""


def size_text(num_bytes: int) -> str:
    """A number of bytes in a readable unit, in powers of 1024."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


def check_disk(name: str, folder: Path, num_bytes: int) -> None:
    """Raises ModelNotFoundError if the disk of a folder, which need not exist yet, has no room for so many bytes."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes and num_bytes + _RESERVE > free:
        raise ModelNotFoundError(
            f"{name} needs {size_text(num_bytes)} in {folder}, and {size_text(free)} are free there; free some, or set "
            "HF_HOME (files of URLs: SAMEWISE_CACHE) to a folder on another disk"
        )


def check_memory(name: str, least: int, most: int | None) -> None:
    """Raises ModelNotFoundError if weights need at least `least` bytes of memory, and only `most` can be had."""
    if most is not None and least > most:
        raise ModelNotFoundError(
            f"{name} needs at least {size_text(least)} of memory for its weights alone, and {size_text(most)} are "
            "free; it was not downloaded. Choose a smaller quantization or model, or a machine with more memory"
        )


def check_architecture(file: GgufFile) -> None:
    """Raises UnsupportedModelError if this server cannot read GGUF files of this kind."""
    from model_runner.gguf.architectures import architecture_of  # noqa: PLC0415  (takes a fifth of a second)

    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise UnsupportedModelError(f"it holds no model: general.type is {kind}")
    architecture_of(file)


def least_bytes_of_gguf(files: Iterable[GgufFile]) -> int:
    """Bytes of memory that the weights certainly need: as stored, or packed to int4, whichever is smaller."""
    tensors = [tensor for file in files for tensor in file.tensors.values()]
    return sum(min(stored_bytes(tensor), tensor.size * _LEAST_BITS // 8) for tensor in tensors)


def stored_bytes(tensor: GgufTensor) -> int:
    """Bytes of a tensor in its file. Raises UnsupportedModelError if its type is unknown."""
    if (stored := BLOCK_FORMATS.get(tensor.block_format)) is None:
        raise UnsupportedModelError(f"{tensor.file.name} has weights of the unknown type {tensor.block_format}")
    return tensor.size // stored.weights * stored.num_bytes


def least_bytes_of_safetensors(heads: Iterable[Mapping[str, Any]]) -> int:
    """As for GGUF files. Types that are unknown count as the smallest."""
    entries = [entry for head in heads for entry in head.values()]
    return sum(
        math.prod(entry["shape"]) * min(BITS.get(entry["dtype"], _LEAST_BITS), _LEAST_BITS) // 8 for entry in entries
    )
