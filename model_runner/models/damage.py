"""Finds the damaged file of a model that cannot be read. Imports no torch."""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model_runner.models.refusal import UnsupportedModelError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@contextmanager
def naming_damage(folder: Path) -> Iterator[None]:
    """Turn any error into an UnsupportedModelError that names a damaged file, if the model's folder has one."""
    try:
        yield
    except Exception as error:
        damage = None if isinstance(error, UnsupportedModelError) else _find_damage(folder)
        if damage is None:
            raise
        raise UnsupportedModelError(damage) from error


def describe_damage(path: Path) -> str | None:
    """The damage of a JSON or weight file, and how to repair it; None if none is found. Raises OSError."""
    if not path.exists():
        return f"{path} is missing; download the model again"
    if is_lfs_pointer(path):
        return f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}"
    if path.suffix == ".json":
        return _damage_of_json(path)
    return _damage_of_safetensors(path) if path.suffix == ".safetensors" else None


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file is a placeholder that Git LFS left for the actual content."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def _find_damage(folder: Path) -> str | None:
    """The first damage among the files that transformers reads."""
    config, index = folder / "config.json", folder / "model.safetensors.index.json"
    files = [file for file in (config, index) if file.exists()]
    try:
        if (damage := next(filter(None, map(describe_damage, files)), None)) is not None:
            return damage
        weights = folder / "model.safetensors"
        if index.exists() and not weights.exists():
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        else:
            shards = [weights.name] if weights.exists() else []
        return next(filter(None, (describe_damage(folder / shard) for shard in shards)), None)
    except (OSError, LookupError, TypeError, AttributeError):
        return None


def _damage_of_json(path: Path) -> str | None:
    try:
        json.loads(path.read_bytes())
    except ValueError as error:
        return f"{path} is not valid JSON ({error}); download it again"
    return None


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
