"""Finds the damaged file of a model that cannot be read. Imports no torch."""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from model_runner.models.refusal import UnsupportedModelError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_INDEX = "model.safetensors.index.json"
_READ_IF_PRESENT = (
    *("config.json", "generation_config.json", _INDEX),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json"),
)
"""Files that are read if a folder has them. Each .json holds an object."""
_LARGE = 1 << 21
"""Bytes from which only the ends of a JSON file are looked at."""
_ENDS = 256
"""How many bytes an end has."""


@contextmanager
def naming_damage(folder: Path) -> Iterator[None]:
    """Turn any error into an UnsupportedModelError that names a damaged file, if the model's folder has one."""
    try:
        yield
    except Exception as error:
        damage = None if isinstance(error, UnsupportedModelError) else find_damage(folder)
        if damage is None:
            raise
        raise UnsupportedModelError(damage) from error


def find_damage(folder: Path) -> str | None:
    """The first damage among the files of a model's folder that are read, and how to repair it; None: none is found."""
    index, weights = folder / _INDEX, folder / "model.safetensors"
    try:
        present = [folder / name for name in _READ_IF_PRESENT if (folder / name).exists()]
        if (damage := _first_damage(present)) is not None:
            return damage
        if weights.exists() or not index.exists():
            return _first_damage([weights] if weights.exists() else [])
        names = json.loads(index.read_bytes()).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            return f"{index} does not name the files of the weights; download it again"
        return _first_damage([folder / shard for shard in sorted(set(names.values()))])
    except OSError:
        return None


def _first_damage(files: Iterable[Path]) -> str | None:
    return next(filter(None, map(describe_damage, files)), None)


def describe_damage(path: Path) -> str | None:
    """The damage of a file, and how to repair it; None if none is found. Raises OSError."""
    if not path.exists():
        return f"{path} is missing; download the model again"
    if path.stat().st_size == 0:
        return f"{path} is empty; download it again"
    if is_lfs_pointer(path):
        return f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}"
    if path.suffix == ".json":
        return _damage_of_json(path)
    return _damage_of_safetensors(path) if path.suffix == ".safetensors" else None


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file is a placeholder that Git LFS left for the actual content."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def _damage_of_json(path: Path) -> str | None:
    if path.stat().st_size > _LARGE:
        return _damage_at_the_ends(path)
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        return f"{path} is not valid JSON ({error}); download it again"
    return None if isinstance(content, dict) else f"{path} does not hold a JSON object; download it again"


def _damage_at_the_ends(path: Path) -> str | None:
    """The damage of a file that holds a large JSON object, which would take long to read."""
    with path.open("rb") as file:
        first = file.read(_ENDS).lstrip()[:1]
        file.seek(-_ENDS, os.SEEK_END)
        last = file.read().rstrip()[-1:]
    if (first, last) == (b"{", b"}"):
        return None
    return f"{path} is not valid JSON: it does not begin and end with braces; download it again"


def _damage_of_safetensors(path: Path) -> str | None:
    """Compare the size of a safetensors file with its header: 8 bytes of length, JSON, then the tensors."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, size)))
        header.pop("__metadata__", None)
        expected = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (struct.error, ValueError, LookupError, TypeError, AttributeError):
        return f"{path} is damaged: its header cannot be read; download it again"
    return None if size == expected else f"{path} has {size:,} bytes instead of {expected:,}; download it again"
