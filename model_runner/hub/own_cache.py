"""Lists and removes what Samewise keeps in its cache folder. Other files there are never touched."""

import contextlib
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model_runner.hub.cached import FOLDER, SOURCE
from model_runner.hub.store import files_below
from model_runner.json_files import read_object

_MODEL_FORM = "[0-9a-f]" * 16
"""The part of a converted model's name that is its hash."""


@dataclass(frozen=True, slots=True)
class CacheKind:
    """One kind of entries."""

    name: str
    pattern: str
    """Where its entries are, below the cache folder."""
    what: str
    """The source of its entries, for people."""


KINDS = (
    CacheKind("models", f"*-{_MODEL_FORM}-*", "converted GGUF files and folders"),
    CacheKind("downloads", f"{FOLDER}/*", "GGUF files of URLs"),
    CacheKind("kernels", "native/*.so", "native libraries"),
    CacheKind("kernels", "*.so", "native libraries"),
    CacheKind("kernels", "native/interface-*.py", "interfaces of native libraries"),
    CacheKind("heads", "learnt/*", "heads for speculation that a server has learnt"),
    CacheKind("packed", "packed/*.packed", "weights of large models as they are in memory"),
    CacheKind("hashes", "hashes", "hashes of files"),
    CacheKind("unfinished", "converting-*", "conversions that were interrupted, or still run"),
    CacheKind("unfinished", "packed/*.writing", "packed weights that are being written, or were interrupted"),
)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Something that can be made or downloaded again, except learnt heads."""

    name: str
    kind: str
    source: str
    size: int
    used: float
    """When it was last read or written, in seconds since 1970, as far as the file system keeps it."""
    path: Path

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def list_cache(folder: Path) -> list[CacheEntry]:
    """The entries of a cache folder, by kind and name."""
    entries = []
    for kind in KINDS:
        for path in sorted(folder.glob(kind.pattern)):
            with contextlib.suppress(OSError):  # another process may remove it
                entries.append(_entry(folder, path, kind))
    return entries


def remove_entries(folder: Path, is_meant: Callable[[CacheEntry], bool]) -> list[CacheEntry]:
    """Remove entries, and return them. A server that uses one keeps it until it ends. Raises OSError."""
    removed = [entry for entry in list_cache(folder) if is_meant(entry)]
    for entry in removed:
        if entry.path.is_dir() and not entry.path.is_symlink():
            shutil.rmtree(entry.path)
        else:
            entry.path.unlink()
    return removed


def bytes_below(path: Path) -> int:
    """Bytes of a file, or of all files below a folder, without what links lead to. Raises OSError."""
    return sum(one.st_size for one in _stats_of(path) if stat.S_ISREG(one.st_mode))


def _entry(folder: Path, path: Path, kind: CacheKind) -> CacheEntry:
    return CacheEntry(
        name=path.relative_to(folder).as_posix(),
        kind=kind.name,
        source=_source(path, kind),
        size=bytes_below(path),
        used=max(max(one.st_atime, one.st_mtime) for one in _stats_of(path)),
        path=path,
    )


def _source(path: Path, kind: CacheKind) -> str:
    """The source of an entry: a converted model's file or folder, a packed model, a download's address."""
    if kind.name == "models":
        return path.name.rsplit("-", 2)[0]
    if kind.name == "packed":
        return path.name.rpartition("-")[0]
    if kind.name == "downloads":
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return str(read_object(path / SOURCE)["url"])
    return kind.what


def _stats_of(path: Path) -> list[os.stat_result]:
    """Status of a file or folder and of all files below; links are not followed."""
    return [one.lstat() for one in (path, *(() if path.is_symlink() else files_below(path)))]
