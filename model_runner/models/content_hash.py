"""Hashes of files, remembered: large ones take a while. Imports no torch."""

import contextlib
import hashlib
import json
import uuid
from pathlib import Path

_SMALL = 1 << 20
"""Bytes below which hashing again is quicker than remembering."""


def hash_file(path: Path, cache: Path) -> str:
    """SHA-256 of the file's content, remembered in the folder `cache` by path, size and time. Raises OSError."""
    status = path.stat()
    stamp = json.dumps([[str(path), status.st_size, status.st_mtime_ns]])
    known = cache / "hashes" / hashlib.sha256(stamp.encode()).hexdigest()
    if known.is_file():
        return known.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if status.st_size >= _SMALL:
        with contextlib.suppress(OSError):  # without a folder to write to, it is hashed at every start
            _remember(known, digest)
    return digest


def _remember(known: Path, digest: str) -> None:
    """At once, for another server may be reading."""
    known.parent.mkdir(parents=True, exist_ok=True)
    written = known.with_suffix(f".{uuid.uuid4().hex}")
    written.write_text(digest)
    written.replace(known)
