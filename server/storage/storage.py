"""One database, in one thread: SQLite in a folder of the server's, or in memory."""

import asyncio
import heapq
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from server.errors import ApiError, BodyTooLargeError, RateLimitError
from server.storage.batches import BatchTable
from server.storage.files_table import FilesTable
from server.storage.migrations import StorageError, migrate
from server.storage.rows import Rows
from server.storage.usage import UsageTable

_T = TypeVar("_T")
FILE = "samewise.sqlite3"
_FOR_PROMISES = 0.5
"""The part of all room that unfinished rows may take: what comes of them needs the rest."""


class NotStoredError(ApiError):
    """What was to be written is not: there is no room for it, or it could not be done. The message says why."""


class TooLargeToStoreError(NotStoredError, BodyTooLargeError):
    """It alone is larger than all that its client may store."""


class PromisesFullError(NotStoredError, RateLimitError):
    """What the server has promised to finish takes all the room that there is for it."""


class Storage:
    """Runs work on the rows. What a work has written is on disk when it returns; what raises has written nothing."""

    def __init__(
        self, folder: Path | None, max_bytes: int, weight_of: Callable[[str], float] = lambda client: 1.0
    ) -> None:
        """Without a folder, all is lost with the process.

        Of more than `max_bytes` the oldest is dropped, of those clients that have more than their shares by weight.

        Raises OSError if the folder cannot be made, StorageError if the database in it cannot be used.
        """
        self._room = _Room(max_bytes, weight_of)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samewise-storage")
        self._connection: sqlite3.Connection | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._connection = _connect(str(folder / FILE))

    async def run(self, work: Callable[[Rows], _T]) -> _T:
        """What the work returns or raises, done in one transaction.

        Raises NotStoredError, or TooLargeToStoreError or PromisesFullError of its kind.
        """

        def on_rows(connection: sqlite3.Connection) -> _T:
            rows = Rows(connection)
            result = work(rows)
            self._room.make(rows)
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


class _Room:
    """The bytes that rows may take, shared between the clients that have rows by their weights.

    A client may have more than its share as long as there is room. When there is none, the oldest rows are dropped of
    the client that has most for its weight, so what one client writes never drops what another keeps within its share.
    """

    def __init__(self, max_bytes: int, weight_of: Callable[[str], float]) -> None:
        self._max_bytes = max_bytes
        self._weight_of = weight_of

    def make(self, rows: Rows) -> None:
        """Drop what is too much after the work of a transaction. Raises TooLargeToStoreError and PromisesFullError."""
        is_full = rows.num_bytes() > self._max_bytes
        if is_full:
            _check_size(rows, self._max_bytes)
        if rows.promised:
            self._check_promises(rows)
        if is_full:
            self._drop(rows)

    def _drop(self, rows: Rows) -> None:
        used = dict(rows.bytes_by_client())
        weights = self._weights(used)
        total, share = sum(used.values()), self._max_bytes / sum(weights.values())
        over = [(-used[client] / weights[client], client) for client in used if used[client] > share * weights[client]]
        heapq.heapify(over)
        while over and total > self._max_bytes:
            client = heapq.heappop(over)[1]
            left = rows.drop_oldest(client)
            dropped, used[client] = used[client] - left, left
            total -= dropped
            if dropped and left > share * weights[client]:
                heapq.heappush(over, (-left / weights[client], client))
        if total > self._max_bytes and rows.writer is not None:
            _check_size(rows, share * self._weight_of(rows.writer))

    def _check_promises(self, rows: Rows) -> None:
        """Raises PromisesFullError, but not for the only promise that there is."""
        promised, client = rows.promised_by_client(), rows.writer or ""
        most, total = self._max_bytes * _FOR_PROMISES, sum(promised.values())
        if total <= most or total == rows.promised:
            return
        weights = self._weights(promised)
        own, share = promised[client], int(most * (weights[client] / sum(weights.values())))
        if own > share:
            raise PromisesFullError(
                f"Responses in the background that have not ended would take {own} bytes of the server's storage, and "
                f"there is room for {share}. Please try again when some of them have ended."
            )

    def _weights(self, clients: Iterable[str]) -> Mapping[str, float]:
        return {client: self._weight_of(client) for client in clients}


def _check_size(rows: Rows, room: float) -> None:
    """Raises TooLargeToStoreError if what was written has more bytes."""
    num_bytes = rows.num_bytes_written()
    if num_bytes > room:
        raise TooLargeToStoreError(
            f"This is larger than all that may be stored: it has {num_bytes} bytes, and there is room for {int(room)}."
        )


def _connect(path: str) -> sqlite3.Connection:
    """The database, which no other process can use meanwhile. Raises StorageError, also if some of it is damaged."""
    connection = None
    try:
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        (finding,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if finding != "ok":
            raise StorageError(f"it is damaged: {' '.join(finding.split())}. Restore a copy, or move it away")
        migrate(connection)
    except (sqlite3.Error, StorageError) as error:
        if connection is not None:
            connection.close()
        raise StorageError(f"The stored data in {path} cannot be used: {error}.") from error
    return connection
