"""Which files there are, and whose; their content lies beside the database."""

import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_COLUMNS = "client, id, filename, purpose, bytes, created_at, expires_at"
_LIVES = "(expires_at IS NULL OR expires_at > ?)"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that is whole and on disk."""

    client: str
    """Whose it is: nobody else finds it."""
    id: str
    filename: str
    """As the client calls it; never part of a path here."""
    purpose: str
    num_bytes: int
    created_at: int
    """In Unix time, as `expires_at`."""
    expires_at: int | None
    """From then on nobody finds it; None: it stays until it is deleted."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of a client's files."""

    purpose: str | None = None
    after: str | None = None
    """Those behind the file of this id."""
    newest_first: bool = True
    limit: int = -1
    """At most so many; all if negative."""


class FilesTable:
    """The table, within one transaction. `now` decides which files have expired."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def add(self, record: FileRecord) -> None:
        """A new file."""
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
        """Some of a client's files; None if it has none of the id that they are to be behind."""
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
        """Of all files, whoever has them."""
        return {file_id for (file_id,) in self._connection.execute("SELECT id FROM files")}

    def delete(self, client: str, file_id: str, now: float) -> FileRecord | None:
        """Take a client's file from the table; returns what it was."""
        record = self.get(client, file_id, now)
        if record is not None:
            self._connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        return record

    def delete_expired(self, now: float) -> Sequence[FileRecord]:
        """Take the files from the table that have expired; returns them."""
        expired = self._select("expires_at <= ?", now)
        self._connection.execute("DELETE FROM files WHERE expires_at <= ?", (now,))
        return expired

    def _select(self, where: str, *values: object) -> Sequence[FileRecord]:
        found = self._connection.execute(f"SELECT {_COLUMNS} FROM files WHERE {where}", values)
        return [FileRecord(*columns) for columns in found]
