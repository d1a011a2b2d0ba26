"""Hashes of files, remembered: large ones take a while. Imports no torch."""

import contextlib
import hashlib
import json
import uuid
from collections.abc import Iterable
from pathlib import Path

_SMALL = 1 << 20
"""Bytes below which hashing again is quicker than remembering."""


def hash_file(path: Path, cache: Path) -> str:
    """SHA-256 of the file's content, remembered in the folder `cache` by path, size and time. Raises OSError."""
    known = cache / "hashes" / hash_listing([path])
    if known.is_file():
        return known.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if path.stat().st_size >= _SMALL:
        with contextlib.suppress(OSError):  # without a folder to write to, it is hashed at every start
            _remember(known, digest)
    return digest


def hash_listing(files: Iterable[Path]) -> str:
    """SHA-256 of the files' paths, sizes and times. Raises OSError."""
    stamps = [(file, file.stat()) for file in files]
    listing = json.dumps([[str(file), status.st_size, status.st_mtime_ns] for file, status in stamps])
    return hashlib.sha256(listing.encode()).hexdigest()


def _remember(known: Path, digest: str) -> None:
    """At once, for another server may be reading."""
    known.parent.mkdir(parents=True, exist_ok=True)
    written = known.with_suffix(f".{uuid.uuid4().hex}")
    written.write_text(digest)
    written.replace(known)
