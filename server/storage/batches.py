"""Batches, and what came of their lines."""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]
MAX_ENDED = 10_000
"""Of each client; older ones are dropped."""
_PAGE = 256
"""Results that are read at a time."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One of them."""

    client: str
    """Whose it is: nobody else finds it."""
    fields: Fields
    """Its object, as clients see it but for what is counted."""
    is_open: bool
    """Whether there is something left to do."""

    @property
    def id(self) -> str:
        batch_id: str = self.fields["id"]
        return batch_id


@dataclass(frozen=True, slots=True)
class LineResult:
    """What came of a line."""

    line: int
    """Its number, from 0."""
    is_error: bool
    body: bytes
    """As it stands in the output or in the errors, without the end of the line."""


class BatchTable:
    """The tables, within one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def put(self, batch: Batch) -> None:
        """Add a batch, or change it. With its end, its results are dropped, and batches beyond MAX_ENDED."""
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
        """Some of a client's; None if it has none of the id that they are to be behind."""
        where, values = "client = ?", [client]
        if after is not None:
            if self.get(after, client) is None:
                return None
            sign = "<" if newest_first else ">"
            where, values = f"{where} AND number {sign} (SELECT number FROM batches WHERE id = ?)", [client, after]
        order = "DESC" if newest_first else "ASC"
        return self._select(f"{where} ORDER BY number {order} LIMIT ?", *values, limit)

    def num_open(self, client: str) -> int:
        """How many of a client's have something left to do."""
        count = "SELECT count(*) FROM batches WHERE client = ? AND is_open"
        (num_open,) = self._connection.execute(count, (client,)).fetchone()
        return int(num_open)

    def open(self) -> Sequence[Batch]:
        """Those of which something is left to do, whoever has them, oldest first."""
        return self._select("is_open ORDER BY number")

    def drop_ended(self, created_before: int) -> None:
        """Forget those that have ended and were created before this time."""
        self._connection.execute("DELETE FROM batches WHERE NOT is_open AND created_at < ?", (created_before,))

    def add_results(self, batch_id: str, results: Sequence[LineResult]) -> None:
        """Write down what came of lines; of what is there already nothing changes."""
        self._connection.executemany(
            "INSERT OR IGNORE INTO batch_results (batch, line, is_error, body) VALUES (?, ?, ?, ?)",
            [(batch_id, one.line, one.is_error, one.body) for one in results],
        )

    def done(self, batch_id: str) -> frozenset[int]:
        """The lines that have results."""
        found = self._connection.execute("SELECT line FROM batch_results WHERE batch = ?", (batch_id,))
        return frozenset(line for (line,) in found)

    def counts(self, batch_id: str) -> tuple[int, int]:
        """How many lines have answers, and how many errors."""
        count = "SELECT count(*), coalesce(sum(is_error), 0) FROM batch_results WHERE batch = ?"
        num_lines, failed = self._connection.execute(count, (batch_id,)).fetchone()
        return num_lines - failed, failed

    def results(self, batch_id: str, *, is_error: bool, after: int) -> Sequence[LineResult]:
        """Some of the results, in the order of the lines, from behind this line on; none when there are no more."""
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
