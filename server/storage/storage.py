"""One SQLite database, used from one thread: in the server's data folder, or in memory."""

import asyncio
import heapq
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from server.errors import ApiError, BodyTooLargeError, RateLimitError
from server.storage import cuts
from server.storage.rows import Rows

_T = TypeVar("_T")
_Table = TypeVar("_Table")
FILE = "samewise.sqlite3"
_FOR_PROMISES = 0.5
"""Share of the room that unfinished rows may take; the rest is for their results."""


class NotStoredError(ApiError):
    """Something was not stored: there is no room, or the disk failed. The message says why."""


class TooLargeToStoreError(NotStoredError, BodyTooLargeError):
    """An object is larger than all the room its client may use."""


class PromisesFullError(NotStoredError, RateLimitError):
    """Background responses that have not ended take all the room reserved for them."""


class Storage:
    """Runs work in transactions. Writes are on disk when `run` returns; work that raises writes nothing."""

    def __init__(
        self, folder: Path | None, max_bytes: int, weight_of: Callable[[str], float] = lambda client: 1.0
    ) -> None:
        """Without a folder, the data lives in memory and is lost with the process.

        Beyond `max_bytes` of rows, clients that exceed their share by weight lose their oldest rows.

        Raises OSError if the folder cannot be made, StorageError if the database in it cannot be used.
        """
        self._room = _Room(max_bytes, weight_of)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samewise-storage")
        self._connection: sqlite3.Connection | None = None
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(folder)
            self._connection = _connect(str(folder / FILE))

    async def run(self, work: Callable[[Rows], _T]) -> _T:
        """Do work on the rows in one transaction, and return its result or raise its error.

        Raises NotStoredError, TooLargeToStoreError or PromisesFullError.
        """

        def on_rows(connection: sqlite3.Connection) -> _T:
            rows = Rows(connection)
            result = work(rows)
            self._room.make(rows)
            return result

        return await self._transaction(on_rows)

    async def on(self, table: Callable[[sqlite3.Connection], _Table], work: Callable[[_Table], _T]) -> _T:
        """Do work on a table in one transaction, and return its result or raise its error.

        Only rows count towards the limit on bytes. Raises NotStoredError.
        """
        return await self._transaction(lambda connection: work(table(connection)))

    def close(self) -> None:
        """Close the database after running work. May be called again."""
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
    """The bytes that rows may take, shared by weight between the clients that have rows.

    A client may exceed its share while there is room. When there is none, the client with the most bytes for its weight
    loses its oldest rows. So no client's writes drop rows that another keeps within its share.
    """

    def __init__(self, max_bytes: int, weight_of: Callable[[str], float]) -> None:
        self._max_bytes = max_bytes
        self._weight_of = weight_of

    def make(self, rows: Rows) -> None:
        """Drop rows until they fit. Raises TooLargeToStoreError and PromisesFullError."""
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
        """Raises PromisesFullError, unless this is the only unfinished response."""
        promised, client = rows.promised_by_client(), rows.writer or ""
        most, total = self._max_bytes * _FOR_PROMISES, sum(promised.values())
        if total <= most or total == rows.promised:
            return
        weights = self._weights(promised)
        own, share = promised[client], int(most * (weights[client] / sum(weights.values())))
        if own > share:
            raise PromisesFullError(
                f"Unfinished background responses would take {own} bytes of the server's storage, and the limit is "
                f"{share}. Please try again when some of them have ended."
            )

    def _weights(self, clients: Iterable[str]) -> Mapping[str, float]:
        return {client: self._weight_of(client) for client in clients}


def _check_size(rows: Rows, room: float) -> None:
    """Raises TooLargeToStoreError if the transaction wrote more than `room` bytes."""
    num_bytes = rows.num_bytes_written()
    if num_bytes > room:
        raise TooLargeToStoreError(f"Too large to store: it has {num_bytes} bytes, and there is room for {int(room)}.")


def _make_private(folder: Path) -> None:
    """Let nobody else read the database, which has conversations. A folder that was there keeps its mode.

    The files that SQLite adds get the mode of the database.
    """
    (folder / FILE).touch(mode=0o600)
    for file in folder.glob(f"{FILE}*"):
        with suppress(PermissionError):  # of another owner, who gave this server the right to write
            file.chmod(0o600)


def _connect(path: str) -> sqlite3.Connection:
    """Open the database for exclusive use. Raises StorageError, also if it is damaged."""
    connection = None
    try:
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        (finding,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if finding != "ok":
            raise StorageError(f"it is damaged: {' '.join(finding.split())}. Restore a backup, or move it away")
        migrate(connection)
    except (sqlite3.Error, StorageError) as error:
        if connection is not None:
            connection.close()
        raise StorageError(f"Cannot use the stored data in {path}: {error}.") from error
    return connection


_ROWS = """
CREATE TABLE rows (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    client TEXT NOT NULL,
    parent TEXT NOT NULL,
    state TEXT NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (parent, kind, id)
);
CREATE INDEX rows_by_id ON rows (kind, id, client);
CREATE INDEX rows_by_parent ON rows (parent, number);
CREATE TABLE total (bytes INTEGER NOT NULL);
INSERT INTO total VALUES (0);
CREATE TRIGGER row_came AFTER INSERT ON rows BEGIN
    UPDATE total SET bytes = bytes + length(new.body) + 256;
END;
CREATE TRIGGER row_changed AFTER UPDATE OF body ON rows BEGIN
    UPDATE total SET bytes = bytes + length(new.body) - length(old.body);
END;
CREATE TRIGGER row_went AFTER DELETE ON rows BEGIN
    UPDATE total SET bytes = bytes - length(old.body) - 256;
END;
"""
_USAGE = """
CREATE TABLE usage (
    client TEXT NOT NULL,
    model TEXT NOT NULL,
    day TEXT NOT NULL,
    requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (client, model, day)
) WITHOUT ROWID;
CREATE INDEX usage_by_day ON usage (day);
"""
_BATCHES = """
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    client TEXT NOT NULL,
    is_open INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX batches_by_client ON batches (client, number);
CREATE TABLE batch_results (
    batch TEXT NOT NULL,
    line INTEGER NOT NULL,
    is_error INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""
_FILES = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    client TEXT NOT NULL,
    id TEXT NOT NULL UNIQUE,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER
);
CREATE INDEX files_by_client ON files (client, number);
CREATE INDEX files_by_end ON files (expires_at) WHERE expires_at IS NOT NULL;
"""
_SHARES = """
ALTER TABLE rows ADD COLUMN promised INTEGER NOT NULL DEFAULT 0;
UPDATE rows SET promised = length(body) + 256 + (
    SELECT coalesce(sum(length(part.body) + 256), 0) FROM rows AS part WHERE part.parent = rows.id
) WHERE state = 'unfinished';
CREATE INDEX rows_by_age ON rows (client, number) WHERE parent = '';
CREATE INDEX rows_promised ON rows (client, promised) WHERE state = 'unfinished';
DROP TRIGGER row_came;
DROP TRIGGER row_changed;
DROP TRIGGER row_went;
DROP TABLE total;
CREATE TABLE totals (client TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO totals SELECT client, sum(length(body) + 256) FROM rows GROUP BY client;
CREATE TRIGGER row_came AFTER INSERT ON rows BEGIN
    INSERT INTO totals VALUES (new.client, length(new.body) + 256)
    ON CONFLICT (client) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER row_changed AFTER UPDATE OF body ON rows BEGIN
    UPDATE totals SET bytes = bytes + length(new.body) - length(old.body) WHERE client = new.client;
END;
CREATE TRIGGER row_went AFTER DELETE ON rows BEGIN
    UPDATE totals SET bytes = bytes - length(old.body) - 256 WHERE client = old.client;
    DELETE FROM totals WHERE client = old.client AND bytes = 0;
END;
CREATE INDEX batches_open ON batches (client, number) WHERE is_open;
CREATE INDEX batches_ended ON batches (client, number) WHERE NOT is_open;
"""
_STEPS: Sequence[str] = (_ROWS, _USAGE, _FILES, _BATCHES, _SHARES, cuts.SCHEMA)
"""The migrations. Released ones are never changed."""


class StorageError(ValueError):
    """The stored data cannot be used."""


def migrate(connection: sqlite3.Connection) -> None:
    """Apply the migrations that this database lacks. Raises StorageError if a newer server wrote it."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(_STEPS):
        raise StorageError(f"it has version {version}, and this server supports up to {len(_STEPS)}")
    for number, step in enumerate(_STEPS[version:], start=version + 1):
        connection.executescript(f"BEGIN; {step} PRAGMA user_version = {number}; COMMIT;")
