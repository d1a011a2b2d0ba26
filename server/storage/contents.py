"""Contents of files in a folder: written, made durable, renamed, read and deleted, in a thread pool."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar

from server.storage.storage import NotStoredError

PREFIX = "file-"
"""The beginning of all ids; no other file in the folder is touched."""
_NUM_THREADS = 4
_PIECE_BYTES = 1 << 18
_T = TypeVar("_T")
_logger = logging.getLogger("samewise.files")


class Contents:
    """Contents of files, by id. A slow disk delays only those who use it, because other threads answer requests."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError if the folder cannot be used."""
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # of another owner, who gave this server the right to write
            folder.chmod(0o700)
        self._folder = folder
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="samewise-files")
        self._at_start = {path: path.stat().st_size for path in folder.glob(f"{PREFIX}*")}
        self.num_bytes = sum(self._at_start.values())
        """Bytes in the folder. Writers add bytes before they write them."""

    def path_of(self, file_id: str) -> Path:
        """The path of a whole file."""
        return self._folder / file_id

    async def create(self, file_id: str) -> FileIO:
        """A file to write, under a temporary name. Raises NotStoredError."""
        path = _unfinished(self.path_of(file_id))
        return await self._written(lambda: _create(path))

    async def write(self, file: FileIO, piece: bytes) -> None:
        """Write a piece. Raises NotStoredError."""
        await self._written(lambda: _write(file, piece))

    async def finish(self, file: FileIO, file_id: str) -> None:
        """Make it durable, and only then give it its final name. Raises NotStoredError."""
        await self._written(lambda: _finish(file, self.path_of(file_id)))

    async def discard(self, file: FileIO, file_id: str, num_bytes: int) -> None:
        """Delete a file that was begun, in whatever state, and release its bytes."""
        await self._run(lambda: _close(file))
        path = self.path_of(file_id)
        await self._remove({_unfinished(path): num_bytes, path: num_bytes})

    async def read(self, file_id: str) -> AsyncIterator[bytes] | None:
        """The content in pieces, even if it is deleted meanwhile; None if it was deleted before."""
        try:
            file = await self._run(lambda: self.path_of(file_id).open("rb"))
        except FileNotFoundError:
            return None
        return self._pieces(file)

    async def remove(self, sizes: Mapping[str, int]) -> None:
        """Delete these files, given with their sizes."""
        await self._remove({self.path_of(file_id): size for file_id, size in sizes.items()})

    async def remove_leftovers(self, known: Collection[str]) -> None:
        """Delete files of an earlier process, except the known ones."""
        leftovers = {path: size for path, size in self._at_start.items() if path.name not in known}
        self._at_start.clear()
        await self._remove(leftovers)

    def close(self) -> None:
        """Wait for running work."""
        self._threads.shutdown(wait=True)

    async def _pieces(self, file: BinaryIO) -> AsyncIterator[bytes]:
        with file:
            while piece := await self._run(lambda: file.read(_PIECE_BYTES)):
                yield piece

    async def _remove(self, sizes: Mapping[Path, int]) -> None:
        gone = await self._run(lambda: _unlink(sizes))
        self.num_bytes -= sum(sizes[path] for path in gone)

    async def _written(self, work: Callable[[], _T]) -> _T:
        """Raises NotStoredError where the disk fails or is full."""
        try:
            return await self._run(work)
        except OSError as error:
            raise NotStoredError(f"The file could not be written: {error.strerror}.") from error

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _unfinished(path: Path) -> Path:
    """The path of a file that is not whole yet."""
    return path.with_suffix(".part")


def _create(path: Path) -> FileIO:
    file = path.open("xb", buffering=0)
    os.fchmod(file.fileno(), 0o600)
    return file


def _write(file: FileIO, piece: bytes) -> None:
    left = memoryview(piece)
    while left:
        left = left[file.write(left) :]


def _finish(file: FileIO, path: Path) -> None:
    os.fsync(file.fileno())
    file.close()
    _unfinished(path).rename(path)
    _sync_folder(path.parent)


def _close(file: FileIO) -> None:
    try:
        file.close()
    except OSError as error:
        _logger.debug("failed to close a file before deleting it: %s", error)  # a failed write may fail again


def _unlink(paths: Iterable[Path]) -> Sequence[Path]:
    """Delete these files, and return those that existed and are gone."""
    gone = []
    for path in paths:
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            _logger.error("failed to delete a file; the next start retries it: %s", error)
        else:
            gone.append(path)
    return gone


def _sync_folder(folder: Path) -> None:
    """Make the names in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
