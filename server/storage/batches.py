"""Batches, and the results of their lines."""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]
MAX_ENDED = 10_000
"""Ended batches kept for each client."""
_PAGE = 256
"""Results read at a time."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of requests."""

    client: str
    """The owner; no other client finds it."""
    fields: Fields
    """Its object as clients see it, without the current counts."""
    is_open: bool
    """Whether the batch still has work to do."""

    @property
    def id(self) -> str:
        batch_id: str = self.fields["id"]
        return batch_id


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of one line of a batch."""

    line: int
    """The line's number, from 0."""
    is_error: bool
    body: bytes
    """The result's line in the output or error file, without the line end."""


class BatchTable:
    """The tables of batches and results, within one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def put(self, batch: Batch) -> None:
        """Add or change a batch. When it ends, its results and batches beyond MAX_ENDED are dropped."""
        self._connection.execute(
            "INSERT INTO batches (id, client, is_open, created_at, body) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET is_open = excluded.is_open, body = excluded.body",
            (batch.id, batch.client, batch.is_open, batch.fields["created_at"], json.dumps(batch.fields)),
        )
        if not batch.is_open:
            self._connection.execute("DELETE FROM batch_results WHERE batch = ?", (batch.id,))
            ended = "FROM batches WHERE client = ? AND NOT is_open"
            newest_dropped = f"(SELECT number {ended} ORDER BY number DESC LIMIT 1 OFFSET ?)"
            self._connection.execute(
                f"DELETE {ended} AND number <= {newest_dropped}", (batch.client, batch.client, MAX_ENDED)
            )

    def get(self, batch_id: str, client: str) -> Batch | None:
        """The client's batch of this id."""
        found = self._select("id = ? AND client = ?", batch_id, client)
        return found[0] if found else None

    def of_client(self, client: str, *, after: str | None, newest_first: bool, limit: int) -> Sequence[Batch] | None:
        """Some of a client's batches; None if there is no batch `after`."""
        where, values = "client = ?", [client]
        if after is not None:
            if self.get(after, client) is None:
                return None
            sign = "<" if newest_first else ">"
            where, values = f"{where} AND number {sign} (SELECT number FROM batches WHERE id = ?)", [client, after]
        order = "DESC" if newest_first else "ASC"
        return self._select(f"{where} ORDER BY number {order} LIMIT ?", *values, limit)

    def num_open(self, client: str) -> int:
        """The number of a client's open batches."""
        count = "SELECT count(*) FROM batches WHERE client = ? AND is_open"
        (num_open,) = self._connection.execute(count, (client,)).fetchone()
        return int(num_open)

    def open(self) -> Sequence[Batch]:
        """The open batches of all clients, oldest first."""
        return self._select("is_open ORDER BY number")

    def drop_ended(self, created_before: int) -> None:
        """Delete ended batches that were created before this time."""
        self._connection.execute("DELETE FROM batches WHERE NOT is_open AND created_at < ?", (created_before,))

    def add_results(self, batch_id: str, results: Sequence[LineResult]) -> None:
        """Store results of lines; results that are stored already do not change."""
        self._connection.executemany(
            "INSERT OR IGNORE INTO batch_results (batch, line, is_error, body) VALUES (?, ?, ?, ?)",
            [(batch_id, one.line, one.is_error, one.body) for one in results],
        )

    def done(self, batch_id: str) -> frozenset[int]:
        """The lines that have results."""
        found = self._connection.execute("SELECT line FROM batch_results WHERE batch = ?", (batch_id,))
        return frozenset(line for (line,) in found)

    def counts(self, batch_id: str) -> tuple[int, int]:
        """The numbers of lines with answers and with errors."""
        count = "SELECT count(*), coalesce(sum(is_error), 0) FROM batch_results WHERE batch = ?"
        num_lines, failed = self._connection.execute(count, (batch_id,)).fetchone()
        return num_lines - failed, failed

    def results(self, batch_id: str, *, is_error: bool, after: int) -> Sequence[LineResult]:
        """The next results after a line, in the order of the lines; none at the end."""
        found = self._connection.execute(
            "SELECT line, body FROM batch_results WHERE batch = ? AND is_error = ? AND line > ? ORDER BY line LIMIT ?",
            (batch_id, is_error, after, _PAGE),
        )
        return [LineResult(line, is_error, body) for line, body in found]

    def _select(self, where: str, *values: object) -> Sequence[Batch]:
        return list(self._batches(where, *values))

    def _batches(self, where: str, *values: object) -> Iterator[Batch]:
        select = f"SELECT client, body, is_open FROM batches WHERE {where}"
        for client, body, is_open in self._connection.execute(select, values):
            yield Batch(client, json.loads(body), bool(is_open))
