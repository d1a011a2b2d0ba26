"""Files that clients have the server keep: their content in a folder, and what is known of them in the database.

A file is written under a name of its own, made durable and renamed, and only then listed; one that is deleted is taken
from the list first. So a crash leaves whole files, and besides at most some content that nobody finds: the next start
deletes it.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from server.errors import InvalidRequestError
from server.storage.contents import PREFIX, Contents
from server.storage.files_table import FileRecord, Selection
from server.storage.storage import NotStoredError, Storage

_T = TypeVar("_T")


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

    def __init__(self, store: "FileStore", file_id: str, file: FileIO) -> None:
        self.num_bytes = 0
        self._store = store
        self._id = file_id
        self._file = file
        self._is_kept = False

    async def write(self, piece: bytes) -> None:
        """Add this. Raises FilesFullError, and NotStoredError if the disk does not take it."""
        await self._store.take_room(len(piece))
        self.num_bytes += len(piece)
        await self._store.contents.write(self._file, piece)

    async def keep(self, new: NewFile) -> FileRecord:
        """Have it be found from now on; nothing more is written. Raises NotStoredError."""
        await self._store.contents.finish(self._file, self._id)
        created = int(self._store.now())
        expires = None if new.lives_s is None else created + new.lives_s
        record = FileRecord(new.client, self._id, new.filename, new.purpose, self.num_bytes, created, expires)
        self._is_kept = True  # also if whoever waits is cancelled meanwhile: it may be listed all the same
        try:
            await self._store.storage.on_files(lambda table: table.add(record))
        except NotStoredError:
            self._is_kept = False
            raise
        return record

    async def discard(self) -> None:
        """Leave nothing of it, unless it is kept."""
        if not self._is_kept:
            await self._store.contents.discard(self._file, self._id, self.num_bytes)


class FileStore:
    """The files of all clients."""

    def __init__(self, data_folder: Path, storage: Storage, max_bytes: int) -> None:
        """All files together may have `max_bytes`. Raises OSError if the folder cannot be used."""
        self.storage = storage
        self.contents = Contents(data_folder / "files")
        self._max_bytes = max_bytes
        self._turn = asyncio.Lock()

    async def in_turn(self, work: Callable[..., _T], *args: Any) -> _T:
        """The result of work on a whole file, done in a thread, one at a time: others need these threads, too."""
        async with self._turn:
            return await asyncio.to_thread(work, *args)

    def now(self) -> float:
        """Unix time."""
        return time.time()

    @asynccontextmanager
    async def draft(self) -> AsyncIterator[Draft]:
        """A file to write. Unless it is kept before the end, nothing stays of it. Raises NotStoredError."""
        file_id = f"{PREFIX}{uuid.uuid4().hex}"
        draft = Draft(self, file_id, await self.contents.create(file_id))
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

    async def read(self, record: FileRecord) -> AsyncIterator[bytes] | None:
        """Its content, a piece at a time, also if it is deleted meanwhile; None if it was deleted before."""
        return await self.contents.read(record.id)

    def path_of(self, record: FileRecord) -> Path:
        """Where its content is, as long as nobody deletes it."""
        return self.contents.path_of(record.id)

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
        await self.contents.remove_leftovers(await self.storage.on_files(lambda table: table.ids()))

    async def take_room(self, num_bytes: int) -> None:
        """Count so many more. Raises FilesFullError, with nothing counted."""
        if self.contents.num_bytes + num_bytes > self._max_bytes:
            await self.sweep()
        if self.contents.num_bytes + num_bytes > self._max_bytes:
            message = (
                f"There is no room for this file: all files together may have {self._max_bytes} bytes on this server. "
                "Delete some that are not needed any more (DELETE /v1/files/{file_id}), or raise its setting "
                "max_files_mib."
            )
            raise FilesFullError(message, param="file", code="files_limit_exceeded")
        self.contents.num_bytes += num_bytes

    def close(self) -> None:
        """When what has begun on the disk is done."""
        self.contents.close()

    async def _remove_content(self, records: Iterable[FileRecord]) -> None:
        await self.contents.remove({record.id: record.num_bytes for record in records})
