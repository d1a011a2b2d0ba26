"""Rows: stored bytes with a kind, an id and an owner. Used in the storage's thread only."""

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from server.storage.cuts import cut, put_files, whole_bodies

_COLUMNS = "number, kind, id, client, body, parent, state"
_OLDEST = "SELECT min(number) FROM rows WHERE parent = ''"
_AMONG = "IN (SELECT value FROM json_each(?))"
_ROW_BYTES = 256
"""Bytes counted for a row in addition to its body."""
UNFINISHED = "unfinished"
"""The state of rows that are never dropped, because the server has promised to finish them."""


@dataclass(frozen=True, slots=True)
class Row:
    """A stored object."""

    kind: str
    id: str
    """Unique among rows of its kind and parent."""
    client: str
    """The owner; no other client finds it."""
    body: bytes
    parent: str = ""
    """The id of the row that it belongs to; deleting that row deletes this one."""
    state: str = ""
    """A mark by which rows can be selected."""


class Rows:
    """The rows of a database, within one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._written: dict[str, int] = {}
        """Bytes of the written rows without parents, by id; 0 if only parts of a row were written."""
        self.writer: str | None = None
        """The client whose rows were written."""
        self.promised = 0
        """Bytes of the unfinished rows that were written, with their parts."""

    def put(self, *rows: Row) -> None:
        """Add or change rows. Changed rows keep their position. An unfinished row comes with its parts."""
        bodies = [cut(row.body) for row in rows]
        short = [replace(row, body=body.text) for row, body in zip(rows, bodies, strict=True)]
        for row in short:
            self.writer = row.client
            self._written.setdefault(row.parent or row.id, 0)
            if not row.parent:
                self._written[row.id] = len(row.body) + _ROW_BYTES
        promised = [_num_promised(row, short) for row in short]
        if any(promised):
            files = {content for body in bodies for _, content in body.files}
            self.promised += sum(promised) + sum(len(content) + _ROW_BYTES for content in files)
        self._connection.executemany(
            "INSERT INTO rows (kind, id, client, body, parent, state, promised) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (parent, kind, id) "
            "DO UPDATE SET body = excluded.body, state = excluded.state, promised = excluded.promised",
            [
                (row.kind, row.id, row.client, row.body, row.parent, row.state, num_bytes)
                for row, num_bytes in zip(short, promised, strict=True)
            ],
        )
        for row, body in zip(rows, bodies, strict=True):
            if body.files:
                key = "SELECT number FROM rows WHERE parent = ? AND kind = ? AND id = ?"
                (number,) = self._connection.execute(key, (row.parent, row.kind, row.id)).fetchone()
                put_files(self._connection, number, row.client, body.files)

    def get(self, kind: str, row_id: str, client: str, parent: str | None = None) -> Row | None:
        """The client's row of this id: the one of this parent, or the newest."""
        of_parent = "" if parent is None else "AND parent = ? "
        values = (kind, row_id, client) if parent is None else (kind, row_id, client, parent)
        found = self._select(f"kind = ? AND id = ? AND client = ? {of_parent}ORDER BY number DESC LIMIT 1", *values)
        return found[0] if found else None

    def of_parent(self, kind: str, parent: str) -> Sequence[Row]:
        """All rows of a kind that belong to the parent, oldest first."""
        return self._select("parent = ? AND kind = ? ORDER BY number", parent, kind)

    def some_of_parent(
        self, kind: str, parent: str, state: str, *, after: str | None, newest_first: bool, limit: int
    ) -> Sequence[Row] | None:
        """Some rows of a kind and state that belong to the parent; None if there is no row `after`."""
        where, values = "parent = ? AND kind = ? AND state = ?", [parent, kind, state]
        if after is not None:
            found = self._connection.execute(f"SELECT number FROM rows WHERE {where} AND id = ?", (*values, after))
            place = found.fetchone()
            if place is None:
                return None
            where, values = f"{where} AND number {'<' if newest_first else '>'} ?", [*values, *place]
        order = "DESC" if newest_first else "ASC"
        return self._select(f"{where} ORDER BY number {order} LIMIT ?", *values, limit)

    def of_kind(self, kind: str) -> Sequence[Row]:
        """All rows of a kind, of all clients, oldest first."""
        return self._select("kind = ? ORDER BY number", kind)

    def delete(self, kind: str, row_id: str, client: str, parent: str = "") -> bool:
        """Delete a client's row and all rows that belong to it. Returns whether it existed."""
        where = "kind = ? AND id = ? AND client = ? AND parent = ?"
        found = self._connection.execute(f"DELETE FROM rows WHERE {where}", (kind, row_id, client, parent)).rowcount
        if found and not parent:
            self._connection.execute("DELETE FROM rows WHERE parent = ?", (row_id,))
        return bool(found)

    def renew(self, kind: str, row_id: str) -> None:
        """Make a row without a parent the newest."""
        self._renew(kind, row_id, "number <= (SELECT max(number) FROM rows)")

    def renew_old(self, kind: str, row_id: str) -> None:
        """Make a row the newest if it is in the older half, so that frequent use does not write every time."""
        self._renew(kind, row_id, f"number - ({_OLDEST}) <= (SELECT max(number) FROM rows) - number")

    def num_bytes(self) -> int:
        """Bytes of all rows."""
        (num_bytes,) = self._connection.execute("SELECT coalesce(sum(bytes), 0) FROM totals").fetchone()
        return int(num_bytes)

    def bytes_by_client(self) -> Mapping[str, int]:
        """Bytes of all rows, by client."""
        return dict(self._connection.execute("SELECT client, bytes FROM totals").fetchall())

    def promised_by_client(self) -> Mapping[str, int]:
        """Bytes of unfinished rows and of their parts as they were written, by client."""
        unfinished = f"FROM rows WHERE state = '{UNFINISHED}'"
        promised = Counter(
            dict(self._connection.execute(f"SELECT client, sum(promised) {unfinished} GROUP BY client").fetchall())
        )
        files = f"{_files_of('client', f'SELECT id {unfinished}')} GROUP BY client"
        promised.update(dict(self._connection.execute(files).fetchall()))
        return promised

    def num_bytes_written(self) -> int:
        """Bytes of the rows that this transaction has written, with all their parts."""
        parts = f"SELECT coalesce(sum(length(body) + {_ROW_BYTES}), 0) FROM rows WHERE parent {_AMONG}"
        written = (json.dumps(list(self._written)),)
        (num_bytes,) = self._connection.execute(parts, written).fetchone()
        files = _files_of("1", "SELECT value FROM json_each(?1)")
        (_, num_file_bytes) = self._connection.execute(files, written).fetchone()
        return int(num_bytes) + int(num_file_bytes) + sum(self._written.values())

    def drop_oldest(self, client: str) -> int:
        """Delete the client's oldest row without a parent, and its parts. Returns the client's remaining bytes.

        Unfinished rows and rows written by this transaction are kept.
        """
        droppable = f"parent = '' AND client = ? AND state != ? AND NOT id {_AMONG} ORDER BY number LIMIT 1"
        values = client, UNFINISHED, json.dumps(list(self._written))
        for kind, row_id in self._connection.execute(f"SELECT kind, id FROM rows WHERE {droppable}", values).fetchall():
            self.delete(kind, row_id, client)
        found = self._connection.execute("SELECT bytes FROM totals WHERE client = ?", (client,)).fetchone()
        return int(found[0]) if found else 0

    def _renew(self, kind: str, row_id: str, where: str) -> None:
        newest = "(SELECT max(number) + 1 FROM rows)"
        self._connection.execute(
            f"UPDATE rows SET number = {newest} WHERE kind = ? AND id = ? AND parent = '' AND {where}", (kind, row_id)
        )

    def _select(self, where: str, *values: object) -> Sequence[Row]:
        found = self._connection.execute(f"SELECT {_COLUMNS} FROM rows WHERE {where}", values).fetchall()
        bodies = whole_bodies(self._connection, {number: body for number, _, _, _, body, _, _ in found})
        return [
            Row(kind, row_id, client, bodies[number], parent, state)
            for number, kind, row_id, client, _, parent, state in found
        ]


def _files_of(group: str, ids: str) -> str:
    """A query for the bytes of the files of rows with these ids and of their parts, by a group."""
    rows = f"SELECT number FROM rows WHERE parent IN ({ids}) UNION ALL "
    rows += f"SELECT number FROM rows WHERE parent = '' AND id IN ({ids})"
    size = f"coalesce(sum(length(body) + {_ROW_BYTES}), 0)"
    return f"SELECT {group}, {size} FROM contents WHERE number IN (SELECT content FROM cuts WHERE number IN ({rows}))"


def _num_promised(row: Row, rows: Sequence[Row]) -> int:
    """Bytes of an unfinished row and of its parts among these rows; 0 for any other row."""
    if row.state != UNFINISHED:
        return 0
    return sum(len(one.body) + _ROW_BYTES for one in rows if one is row or one.parent == row.id)
