"""Files that clients have the server keep: their content in a folder, and what is known of them in the database.

A file is written under a name of its own, made durable and renamed, and only then listed; one that is deleted is taken
from the list first. So a crash leaves whole files, and besides at most some content that nobody finds: the next start
deletes it.
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar

from server.errors import InvalidRequestError
from server.storage.files_table import FileRecord, Selection
from server.storage.storage import NotStoredError, Storage

_PREFIX = "file-"
_T = TypeVar("_T")
_logger = logging.getLogger("samewise.files")


class FilesFullError(NotStoredError, InvalidRequestError):
    """All files together would be larger than they may be."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """What is to be known of a file that is written."""

    client: str
    filename: str
    purpose: str
    lives_s: int | None = None
    """Seconds after which it expires; None: never."""


class Draft:
    """A file that is being written: nobody finds it before it is kept. Made by `FileStore.draft`."""

    def __init__(self, store: "FileStore", path: Path, file: FileIO) -> None:
        self.num_bytes = 0
        self._store = store
        self._path = path
        self._file = file
        self._is_kept = False

    async def write(self, piece: bytes) -> None:
        """Add this. Raises FilesFullError, and NotStoredError if the disk does not take it."""
        await self._store.take_room(len(piece))
        self.num_bytes += len(piece)
        await _on_disk(lambda: _write(self._file, piece))

    async def keep(self, new: NewFile) -> FileRecord:
        """Have it be found from now on; nothing more is written. Raises NotStoredError."""
        await _on_disk(self._finish)
        created = int(self._store.now())
        expires = None if new.lives_s is None else created + new.lives_s
        record = FileRecord(new.client, self._path.name, new.filename, new.purpose, self.num_bytes, created, expires)
        self._is_kept = True  # also if whoever waits is cancelled meanwhile: it may be listed all the same
        try:
            await self._store.storage.on_files(lambda table: table.add(record))
        except NotStoredError:
            self._is_kept = False
            raise
        return record

    async def discard(self) -> None:
        """Leave nothing of it, unless it is kept."""
        with suppress(OSError):  # where it could not be written, this may fail once more
            await asyncio.to_thread(self._file.close)
        if not self._is_kept:
            await self._store.remove({_unfinished(self._path): self.num_bytes, self._path: self.num_bytes})

    def _finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        _unfinished(self._path).rename(self._path)
        _sync_folder(self._path.parent)


class FileStore:
    """The files of all clients."""

    def __init__(self, data_folder: Path, storage: Storage, max_bytes: int) -> None:
        """All files together may have `max_bytes`. Raises OSError if the folder cannot be used."""
        self.storage = storage
        self._folder = data_folder / "files"
        self._folder.mkdir(exist_ok=True)
        self._max_bytes = max_bytes
        self._at_start = {path: path.stat().st_size for path in self._folder.glob(f"{_PREFIX}*")}
        self._num_bytes = sum(self._at_start.values())
        """Of all that is in the folder, and of what is about to be."""

    def now(self) -> float:
        """Unix time."""
        return time.time()

    @asynccontextmanager
    async def draft(self) -> AsyncIterator[Draft]:
        """A file to write. Unless it is kept before the end, nothing stays of it. Raises NotStoredError."""
        path = self._folder / f"{_PREFIX}{uuid.uuid4().hex}"
        draft = Draft(self, path, await _on_disk(lambda: _unfinished(path).open("xb", buffering=0)))
        try:
            yield draft
        finally:
            await draft.discard()

    async def store(self, new: NewFile, pieces: AsyncIterable[bytes]) -> FileRecord:
        """Write and keep a file. Raises NotStoredError, and whatever the pieces do: then there is none."""
        async with self.draft() as draft:
            async for piece in pieces:
                await draft.write(piece)
            return await draft.keep(new)

    async def find(self, client: str, file_id: str) -> FileRecord | None:
        """The client's file of this id."""
        return await self.storage.on_files(lambda table: table.get(client, file_id, self.now()))

    async def list(self, client: str, asked: Selection) -> Sequence[FileRecord] | None:
        """Some of the client's files; None if it has none of the id that they are to be behind."""
        return await self.storage.on_files(lambda table: table.of_client(client, asked, self.now()))

    def path_of(self, record: FileRecord) -> Path:
        """Where its content is, as long as nobody deletes it."""
        return self._folder / record.id

    async def open(self, record: FileRecord) -> BinaryIO | None:
        """Its content, which stays there until it is closed; None if it has been deleted."""
        try:
            return await asyncio.to_thread(self.path_of(record).open, "rb")
        except FileNotFoundError:
            return None

    async def delete(self, client: str, file_id: str) -> bool:
        """Delete the client's file; returns whether it was there."""
        record = await self.storage.on_files(lambda table: table.delete(client, file_id, self.now()))
        if record is not None:
            await self._remove_content([record])
        return record is not None

    async def sweep(self) -> None:
        """Delete the files that have expired."""
        await self._remove_content(await self.storage.on_files(lambda table: table.delete_expired(self.now())))

    async def sweep_leftovers(self) -> None:
        """Delete what an earlier process has written and never listed."""
        listed = await self.storage.on_files(lambda table: table.ids())
        leftovers = {path: size for path, size in self._at_start.items() if path.name not in listed}
        self._at_start.clear()
        await self.remove(leftovers)

    async def take_room(self, num_bytes: int) -> None:
        """Count so many more. Raises FilesFullError, with nothing counted."""
        if self._num_bytes + num_bytes > self._max_bytes:
            await self.sweep()
        if self._num_bytes + num_bytes > self._max_bytes:
            message = (
                f"There is no room for this file: all files together may have {self._max_bytes} bytes on this server. "
                "Delete some that are not needed any more (DELETE /v1/files/{file_id}), or raise its setting "
                "max_files_mib."
            )
            raise FilesFullError(message, param="file", code="files_limit_exceeded")
        self._num_bytes += num_bytes

    async def remove(self, content: dict[Path, int]) -> None:
        """Delete what is on the disk of these, and count so many bytes less for it."""
        gone = await asyncio.to_thread(_unlink, content)
        self._num_bytes -= sum(content[path] for path in gone)

    async def _remove_content(self, records: Iterable[FileRecord]) -> None:
        await self.remove({self.path_of(record): record.num_bytes for record in records})


def _unfinished(path: Path) -> Path:
    """Where the content is before it is whole."""
    return path.with_suffix(".part")


def _write(file: FileIO, piece: bytes) -> None:
    left = memoryview(piece)
    while left:
        left = left[file.write(left) :]


def _unlink(paths: Iterable[Path]) -> Sequence[Path]:
    """Returns those that were there and are gone."""
    gone = []
    for path in paths:
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            _logger.error("a file cannot be deleted before the next start: %s", error)
        else:
            gone.append(path)
    return gone


async def _on_disk(work: Callable[[], _T]) -> _T:
    """The work, done in a thread. Raises NotStoredError where the disk fails or is full."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise NotStoredError(f"The file could not be written: {error.strerror}.") from error


def _sync_folder(folder: Path) -> None:
    """Make the names in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
