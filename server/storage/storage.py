"""One database, in one thread: SQLite in a folder of the server's, or in memory."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from server.errors import ApiError, BodyTooLargeError
from server.storage.batches import BatchTable
from server.storage.files_table import FilesTable
from server.storage.migrations import StorageError, migrate
from server.storage.rows import Rows
from server.storage.usage import UsageTable

_T = TypeVar("_T")
FILE = "samewise.sqlite3"
UNFINISHED = "unfinished"
"""State of rows that are not dropped: the server has promised to finish them."""


class NotStoredError(ApiError):
    """What was to be written is not: there is no room for it, or it could not be done. The message says why."""


class TooLargeToStoreError(NotStoredError, BodyTooLargeError):
    """It alone is larger than all that may be stored."""


class Storage:
    """Runs work on the rows. What a work has written is on disk when it returns; what raises has written nothing."""

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        """Without a folder, all is lost with the process. Of more than `max_bytes` the oldest is dropped.

        Raises OSError if the folder cannot be made, StorageError if the database in it cannot be used.
        """
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samewise-storage")
        self._connection: sqlite3.Connection | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._connection = _connect(str(folder / FILE))

    async def run(self, work: Callable[[Rows], _T]) -> _T:
        """What the work returns or raises, done in one transaction.

        Raises NotStoredError, or TooLargeToStoreError of its kind.
        """

        def on_rows(connection: sqlite3.Connection) -> _T:
            rows = Rows(connection)
            result = work(rows)
            self._make_room(rows)
            return result

        return await self._transaction(on_rows)

    async def on_usage(self, work: Callable[[UsageTable], _T]) -> _T:
        """The same with the table of what was used, which the bound on bytes does not count."""
        return await self._transaction(lambda connection: work(UsageTable(connection)))

    async def on_files(self, work: Callable[[FilesTable], _T]) -> _T:
        """The same with the table of files, whose content is elsewhere and has a bound of its own."""
        return await self._transaction(lambda connection: work(FilesTable(connection)))

    async def on_batches(self, work: Callable[[BatchTable], _T]) -> _T:
        """The same with the tables of batches."""
        return await self._transaction(lambda connection: work(BatchTable(connection)))

    def close(self) -> None:
        """When what has begun is done. May be called again."""
        self._thread.shutdown(wait=True)
        if self._connection is not None:
            self._connection.close()

    async def _transaction(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        if self._connection is None:
            self._connection = _connect(":memory:")
        try:
            with self._connection:
                self._connection.execute("BEGIN")
                return work(self._connection)
        except sqlite3.Error as error:
            raise NotStoredError(f"The server's storage failed: {error}.") from error

    def _make_room(self, rows: Rows) -> None:
        if rows.num_bytes() <= self._max_bytes:
            return
        if rows.num_bytes_written() > self._max_bytes:
            raise TooLargeToStoreError("This is larger than all that the server may store.")
        rows.drop_oldest(self._max_bytes, but_kept=UNFINISHED)


def _connect(path: str) -> sqlite3.Connection:
    """The database, which no other process can use meanwhile. Raises StorageError."""
    connection = None
    try:
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        migrate(connection)
    except (sqlite3.Error, StorageError) as error:
        if connection is not None:
            connection.close()
        raise StorageError(f"The stored data in {path} cannot be used: {error}.") from error
    return connection
