"""The form of the database, as the steps that lead to it. A step that was released is never changed."""

import sqlite3
from collections.abc import Sequence

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
_STEPS: Sequence[str] = (_ROWS, _USAGE, _FILES, _BATCHES, _SHARES)


class StorageError(ValueError):
    """The stored data cannot be used."""


def migrate(connection: sqlite3.Connection) -> None:
    """Take the steps that this database has not taken. Raises StorageError for one that is ahead of them."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(_STEPS):
        raise StorageError(f"it has version {version}, and this server knows {len(_STEPS)}")
    for number, step in enumerate(_STEPS[version:], start=version + 1):
        connection.executescript(f"BEGIN; {step} PRAGMA user_version = {number}; COMMIT;")
