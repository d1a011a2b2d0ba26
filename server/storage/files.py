"""Files of clients: their content in a folder, and their records in the database.

A file is written under a temporary name, made durable and renamed, and only then listed. A deleted file leaves the list
first. So a crash leaves whole files, and at most some content without a record, which the next start deletes.
"""

import asyncio
import sqlite3
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from server.errors import InvalidRequestError
from server.storage.contents import PREFIX, Contents
from server.storage.storage import NotStoredError, Storage

_COLUMNS = "client, id, filename, purpose, bytes, created_at, expires_at"
_LIVES = "(expires_at IS NULL OR expires_at > ?)"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The record of a complete file on disk."""

    client: str
    """The owner; no other client finds it."""
    id: str
    filename: str
    """The client's name for the file; never part of a path."""
    purpose: str
    num_bytes: int
    created_at: int
    """In Unix time, as `expires_at`."""
    expires_at: int | None
    """Unix time from which the file is not found any more; None if it never expires."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A filter for a client's files."""

    purpose: str | None = None
    after: str | None = None
    """The id of the file before the first."""
    newest_first: bool = True
    limit: int = -1
    """The most files; all if negative."""


class FilesTable:
    """The records of files, within one transaction. `now` decides which files have expired."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def add(self, record: FileRecord) -> None:
        """Add a file."""
        self._connection.execute(
            f"INSERT INTO files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                record.client,
                record.id,
                record.filename,
                record.purpose,
                record.num_bytes,
                record.created_at,
                record.expires_at,
            ),
        )

    def get(self, client: str, file_id: str, now: float) -> FileRecord | None:
        """The client's file of this id."""
        found = self._select(f"client = ? AND id = ? AND {_LIVES}", client, file_id, now)
        return found[0] if found else None

    def of_client(self, client: str, asked: Selection, now: float) -> Sequence[FileRecord] | None:
        """Some of a client's files; None if there is no file `after`."""
        where, values = f"client = ? AND {_LIVES}", [client, now]
        if asked.purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, asked.purpose]
        if asked.after is not None:
            if self.get(client, asked.after, now) is None:
                return None
            sign = "<" if asked.newest_first else ">"
            where = f"{where} AND number {sign} (SELECT number FROM files WHERE id = ?)"
            values = [*values, asked.after]
        order = "DESC" if asked.newest_first else "ASC"
        return self._select(f"{where} ORDER BY number {order} LIMIT ?", *values, asked.limit)

    def ids(self) -> Collection[str]:
        """The ids of the files of all clients."""
        return {file_id for (file_id,) in self._connection.execute("SELECT id FROM files")}

    def delete(self, client: str, file_id: str, now: float) -> FileRecord | None:
        """Remove a client's file from the table, and return it."""
        record = self.get(client, file_id, now)
        if record is not None:
            self._connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        return record

    def delete_expired(self, now: float) -> Sequence[FileRecord]:
        """Remove the expired files from the table, and return them."""
        expired = self._select("expires_at <= ?", now)
        self._connection.execute("DELETE FROM files WHERE expires_at <= ?", (now,))
        return expired

    def _select(self, where: str, *values: object) -> Sequence[FileRecord]:
        found = self._connection.execute(f"SELECT {_COLUMNS} FROM files WHERE {where}", values)
        return [FileRecord(*columns) for columns in found]


_T = TypeVar("_T")


class FilesFullError(NotStoredError, InvalidRequestError):
    """All files together would exceed `max_files_mib`."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """The description of a file to write."""

    client: str
    filename: str
    purpose: str
    lives_s: int | None = None
    """Seconds until it expires; None if never."""


class Draft:
    """A file that is being written, and is not listed before `keep`. Made by `FileStore.draft`."""

    def __init__(self, store: "FileStore", file_id: str, file: FileIO) -> None:
        self.num_bytes = 0
        self._store = store
        self._id = file_id
        self._file = file
        self._is_kept = False

    async def write(self, piece: bytes) -> None:
        """Write a piece. Raises FilesFullError, and NotStoredError if the disk fails."""
        await self._store.take_room(len(piece))
        self.num_bytes += len(piece)
        await self._store.contents.write(self._file, piece)

    async def keep(self, new: NewFile) -> FileRecord:
        """Finish the file and list it. Raises NotStoredError."""
        await self._store.contents.finish(self._file, self._id)
        created = int(self._store.now())
        expires = None if new.lives_s is None else created + new.lives_s
        record = FileRecord(new.client, self._id, new.filename, new.purpose, self.num_bytes, created, expires)
        self._is_kept = True  # before the caller can be cancelled: the record may be written even then
        try:
            await self._store.storage.on(FilesTable, lambda table: table.add(record))
        except NotStoredError:
            self._is_kept = False
            raise
        return record

    async def discard(self) -> None:
        """Delete it, unless it is kept."""
        if not self._is_kept:
            await self._store.contents.discard(self._file, self._id, self.num_bytes)


class FileStore:
    """The files of all clients."""

    def __init__(self, data_folder: Path, storage: Storage, max_bytes: int) -> None:
        """`max_bytes` limits all files together. Raises OSError if the folder cannot be used."""
        self.storage = storage
        self.contents = Contents(data_folder / "files")
        self._max_bytes = max_bytes
        self._turn = asyncio.Lock()

    async def in_turn(self, work: Callable[..., _T], *args: Any) -> _T:
        """Return the result of work on a whole file, done in a thread. One at a time, to leave threads for others."""
        async with self._turn:
            return await asyncio.to_thread(work, *args)

    def now(self) -> float:
        """Unix time."""
        return time.time()

    @asynccontextmanager
    async def draft(self) -> AsyncIterator[Draft]:
        """A file to write, which is deleted at the end unless it was kept. Raises NotStoredError."""
        file_id = f"{PREFIX}{uuid.uuid4().hex}"
        draft = Draft(self, file_id, await self.contents.create(file_id))
        try:
            yield draft
        finally:
            await draft.discard()

    async def store(self, new: NewFile, pieces: AsyncIterable[bytes]) -> FileRecord:
        """Write and keep a file. Raises NotStoredError and the errors of `pieces`, and then leaves no file."""
        async with self.draft() as draft:
            async for piece in pieces:
                await draft.write(piece)
            return await draft.keep(new)

    async def find(self, client: str, file_id: str) -> FileRecord | None:
        """The client's file of this id."""
        return await self.storage.on(FilesTable, lambda table: table.get(client, file_id, self.now()))

    async def list(self, client: str, asked: Selection) -> Sequence[FileRecord] | None:
        """Some of the client's files; None if there is no file `after`."""
        return await self.storage.on(FilesTable, lambda table: table.of_client(client, asked, self.now()))

    async def read(self, record: FileRecord) -> AsyncIterator[bytes] | None:
        """Its content in pieces, even if it is deleted meanwhile; None if it was deleted before."""
        return await self.contents.read(record.id)

    def path_of(self, record: FileRecord) -> Path:
        """The path of its content, until it is deleted."""
        return self.contents.path_of(record.id)

    async def delete(self, client: str, file_id: str) -> bool:
        """Delete the client's file; returns whether it was there."""
        record = await self.storage.on(FilesTable, lambda table: table.delete(client, file_id, self.now()))
        if record is not None:
            await self._remove_content([record])
        return record is not None

    async def sweep(self) -> None:
        """Delete the files that have expired."""
        await self._remove_content(await self.storage.on(FilesTable, lambda table: table.delete_expired(self.now())))

    async def sweep_leftovers(self) -> None:
        """Delete content that an earlier process never listed."""
        await self.contents.remove_leftovers(await self.storage.on(FilesTable, lambda table: table.ids()))

    async def take_room(self, num_bytes: int) -> None:
        """Reserve room for this many bytes. Raises FilesFullError."""
        if self.contents.num_bytes + num_bytes > self._max_bytes:
            await self.sweep()
        if self.contents.num_bytes + num_bytes > self._max_bytes:
            message = (
                f"There is no room for this file: the server stores at most {self._max_bytes} bytes of files. Delete "
                "files that you do not need any more (DELETE /v1/files/{file_id}), or raise the server's setting "
                "max_files_mib."
            )
            raise FilesFullError(message, param="file", code="files_limit_exceeded")
        self.contents.num_bytes += num_bytes

    def close(self) -> None:
        """Wait for running work on the disk."""
        self.contents.close()

    async def _remove_content(self, records: Iterable[FileRecord]) -> None:
        await self.contents.remove({record.id: record.num_bytes for record in records})
