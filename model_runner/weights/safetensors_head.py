"""Heads of safetensors files, and the files that an index names. Imports no torch.

Format: eight bytes with the size of a JSON header, the header, then the tensors
(https://github.com/huggingface/safetensors#format).
"""

import math
import struct
from pathlib import Path
from typing import Any

from model_runner.json_files import LARGE, is_safe_path, parse_object, read_object
from model_runner.refusal import UnsupportedModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SIZE = struct.Struct("<Q")
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
"""Size of a number, by its type."""
_LARGEST_TENSOR = 1 << 62
"""Bytes, and the most of each dimension: products of larger numbers do not fit into 64 bits."""


def end_of_head(start: bytes, name: str) -> int:
    """Bytes of the head of a safetensors file, from its first eight. Raises UnsupportedModelError if it is none."""
    if len(start) < _SIZE.size:
        raise UnsupportedModelError(f"{name} is damaged: it is shorter than a header; download it again")
    (length,) = _SIZE.unpack_from(start)
    if length > LARGE:
        raise UnsupportedModelError(f"{name} is damaged: its header would have {length:,} bytes; download it again")
    return _SIZE.size + int(length)


def parse_safetensors_head(content: bytes, name: str) -> dict[str, Any]:
    """The `dtype`, `shape` and `data_offsets` of each tensor, from a whole head.

    Raises:
        UnsupportedModelError: if it is damaged; `name` is the file, for the message.
    """
    head = parse_object(content[_SIZE.size :], f"the header of {name}", most=LARGE)
    head.pop("__metadata__", None)
    for tensor, entry in head.items():
        if not _is_entry(entry):
            raise UnsupportedModelError(
                f"{name} is damaged: type, shape and place of the tensor {tensor[:80]!r} do not fit; download it again"
            )
    return head


def read_safetensors_head(path: Path) -> tuple[dict[str, Any], int]:
    """The head of a file as `parse_safetensors_head` returns it, and the bytes before the first tensor.

    Raises:
        UnsupportedModelError: if it is damaged, or tensors end elsewhere than the file.
        OSError: if it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_SIZE.size)
        end = end_of_head(start, str(path))
        if end > size:
            raise UnsupportedModelError(f"{path} is damaged: it ends within its header; download it again")
        head = parse_safetensors_head(start + file.read(end - _SIZE.size), str(path))
    expected = end + max((entry["data_offsets"][1] for entry in head.values()), default=0)
    if size != expected:
        raise UnsupportedModelError(f"{path} has {size:,} bytes instead of {expected:,}; download it again")
    return head, end


def shards_of(index: Path) -> list[str]:
    """The files that an index names, all inside of its folder. Raises UnsupportedModelError, and OSError."""
    names = read_object(index, most=LARGE).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UnsupportedModelError(f"{index} does not name the files of the weights; download it again")
    if outside := sorted(name for name in set(names.values()) if not is_safe_path(name)):
        raise UnsupportedModelError(f"{index} names the file {outside[0]!r}, which is outside of its folder")
    return sorted(set(names.values()))


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights of a folder; none if it has no safetensors.

    Raises:
        UnsupportedModelError: if the index is damaged, or names files outside of the folder.
    """
    whole, index = folder / SINGLE, folder / INDEX
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    return [folder / name for name in shards_of(index)]


def _is_entry(entry: Any) -> bool:
    """Whether a tensor's entry has the right form."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, place = entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(shape, list) and isinstance(place, list) and len(place) == 2):
        return False
    sizes = [*shape, *place]
    if not all(type(size) is int and 0 <= size < _LARGEST_TENSOR for size in sizes):
        return False
    bits = BITS.get(entry["dtype"])
    num_bytes: int = place[1] - place[0]
    return num_bytes >= 0 if bits is None else math.prod(shape) * bits == num_bytes * 8
