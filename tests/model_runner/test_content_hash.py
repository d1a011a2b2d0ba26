"""Hashes of files, remembered."""

import hashlib
import os
from pathlib import Path

from model_runner.hub.repository import hash_file

LARGE = bytes(1 << 20)


def test_a_large_file_is_read_once(tmp_path: Path) -> None:
    file, cache = tmp_path / "file", tmp_path / "cache"
    file.write_bytes(LARGE)
    digest = hash_file(file, cache)
    assert digest == hashlib.sha256(LARGE).hexdigest()
    (known,) = (cache / "hashes").iterdir()
    assert known.read_text() == digest
    status = file.stat()
    file.write_bytes(LARGE[:-1] + b"x")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # who hides a change like this is not noticed
    assert hash_file(file, cache) == digest


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(LARGE)
    first = hash_file(file, tmp_path)
    file.write_bytes(LARGE[:-1] + b"x")
    os.utime(file, ns=(0, 1))
    assert hash_file(file, tmp_path) != first


def test_small_files_leave_nothing(tmp_path: Path) -> None:
    file, cache = tmp_path / "file", tmp_path / "cache"
    file.write_bytes(b"x")
    assert hash_file(file, cache) == hashlib.sha256(b"x").hexdigest()
    assert not cache.exists()


def test_without_a_place_to_remember(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(LARGE)
    assert hash_file(file, file) == hashlib.sha256(LARGE).hexdigest()
