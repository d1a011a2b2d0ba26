"""Folders of built native libraries: what lies in them is checked before it is loaded, and written at once.

A library runs with all rights of the server. So its folder and its file must belong to the server's user or to root,
and nobody else may write to them. A library ends with the SHA-256 of what comes before, because the system's loader
does not notice a file that was cut off, and the process would die at the first missing page.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGED = Path(__file__).parent / "built"
"""Libraries that came with the package. Users who can change them can change this code, so only their content is
checked."""

_SEAL_BYTES = hashlib.sha256().digest_size
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotTrustedError(OSError):
    """Another user could have written a folder or a file. The message says which, and what to do."""


def private_folder() -> Path:
    """A folder for libraries that is the user's own, used if the cache cannot be: below the system's temporary one."""
    return Path(tempfile.gettempdir()) / f"samewise-{os.geteuid()}"


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of the folder, after its owner and mode have been checked. Makes the folder if it is missing.

    Raises:
        NotTrustedError: if another user owns it or can write to it.
        OSError: if it cannot be made or read.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        check_owner(folder, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def loadable(path: Path) -> Iterator[str]:
    """The name to load a library by, after its folder, owner, mode and content have been checked.

    The name leads through the checked folder's descriptor, so that nobody can exchange the folder in between.

    Raises:
        NotTrustedError: if another user owns the library or its folder, or can write to one of them.
        OSError: if it cannot be read, or its content is not what was written.
    """
    if path.parent == PACKAGED:
        with path.open("rb") as file:
            _check_seal(path, file.read())
        yield str(path)
        return
    with opened(path.parent) as folder:
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - it takes the descriptor over
            check_owner(path, os.fstat(descriptor))
            _check_seal(path, file.read())
        through = Path(f"/proc/self/fd/{folder}")
        yield str((through if through.exists() else path.parent) / path.name)


def try_loading(path: Path) -> None:
    """Load a library, to find out whether it can be. Raises OSError, with the reason."""
    with loadable(path) as name:
        ctypes.CDLL(name)


@contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Hold the lock of an open folder, which other processes and threads wait for.

    Where the file system has no locks, as NFS may have none, nobody waits: two processes may then build the same
    library, and the later one replaces it by an equal one.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield


def store(built: Path, library: Path, mode: int = 0o600) -> None:
    """Move a new library to its place, durably: the place holds all of it or nothing, even after a power failure."""
    content = built.read_bytes()
    with built.open("ab") as file:
        file.write(hashlib.sha256(content).digest())
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    built.replace(library)


def unsealed(path: Path) -> bytes:
    """The content that `store` was given, of a file that `loadable` has checked."""
    return path.read_bytes()[:-_SEAL_BYTES]


def check_owner(path: Path, status: os.stat_result) -> None:
    """Raises NotTrustedError if another user owns a file or folder, or can write to it."""
    advice = "remove it, or set SAMEWISE_CACHE to a folder that only you can write to"
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        raise NotTrustedError(f"{path} belongs to user {status.st_uid}, but the server runs as user {user}; {advice}")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise NotTrustedError(f"other users can write to {path} (its mode is {mode:04o}); {advice}")


def _check_seal(path: Path, content: bytes) -> None:
    if hashlib.sha256(content[:-_SEAL_BYTES]).digest() != content[-_SEAL_BYTES:]:
        raise OSError(f"{path} is damaged: its content does not fit its checksum")
