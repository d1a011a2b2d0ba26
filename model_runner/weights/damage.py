"""Finds the damaged file of a model that cannot be read. Imports no torch."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from model_runner.json_files import LARGE, read_object
from model_runner.refusal import UnsupportedModelError
from model_runner.weights.safetensors_head import INDEX, SINGLE, read_safetensors_head, shards_of

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_READ_IF_PRESENT = (
    *("config.json", "generation_config.json", INDEX),
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
    index, weights = folder / INDEX, folder / SINGLE
    try:
        present = [folder / name for name in _READ_IF_PRESENT if (folder / name).exists()]
        if (damage := _first_damage(present)) is not None:
            return damage
        if weights.exists() or not index.exists():
            return _first_damage([weights] if weights.exists() else [])
        return _first_damage([folder / shard for shard in shards_of(index)])
    except UnsupportedModelError as error:
        return str(error)
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
    if path.suffix == ".json" and path.stat().st_size > _LARGE:
        return _damage_at_the_ends(path)
    try:
        if path.suffix == ".json":
            read_object(path, most=LARGE)
        elif path.suffix == ".safetensors":
            read_safetensors_head(path)
    except UnsupportedModelError as error:
        return str(error)
    return None


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file is a placeholder that Git LFS left for the actual content."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def _damage_at_the_ends(path: Path) -> str | None:
    """The damage of a file that holds a large JSON object, which would take long to read."""
    with path.open("rb") as file:
        first = file.read(_ENDS).lstrip()[:1]
        file.seek(-_ENDS, os.SEEK_END)
        last = file.read().rstrip()[-1:]
    if (first, last) == (b"{", b"}"):
        return None
    return f"{path} is not valid JSON: it does not begin and end with braces; download it again"
