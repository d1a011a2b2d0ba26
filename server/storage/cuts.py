"""Files in data URLs of stored bodies, such as pictures, are taken out of the bodies and stored once for each client.

Agents send all pictures of a conversation again in each turn, a response in a conversation is stored in both, and an
unfinished response is stored with what it answers. A file is deleted with the last row that has it: the database does
that itself, so that it holds after a crash.
"""

import hashlib
import json
import re
import sqlite3
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LEAST = 4096
"""Shorter files stay in their bodies."""
_FILE = re.compile(rb"(?i:(?<=;base64,))[A-Za-z0-9+/]{%d,}={0,2}" % _LEAST)
SCHEMA = """
CREATE TABLE contents (
    number INTEGER PRIMARY KEY,
    client TEXT NOT NULL,
    digest BLOB NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (client, digest)
);
CREATE TABLE cuts (
    number INTEGER NOT NULL,
    place INTEGER NOT NULL,
    content INTEGER NOT NULL,
    PRIMARY KEY (number, place)
) WITHOUT ROWID;
CREATE INDEX cuts_by_content ON cuts (content);
CREATE TRIGGER cut_row_moved AFTER UPDATE OF number ON rows BEGIN
    UPDATE cuts SET number = new.number WHERE number = old.number;
END;
CREATE TRIGGER cut_row_changed AFTER UPDATE OF body ON rows BEGIN
    DELETE FROM cuts WHERE number = new.number;
END;
CREATE TRIGGER cut_row_went AFTER DELETE ON rows BEGIN
    DELETE FROM cuts WHERE number = old.number;
END;
CREATE TRIGGER cut_went AFTER DELETE ON cuts BEGIN
    DELETE FROM contents WHERE number = old.content AND NOT EXISTS (SELECT 1 FROM cuts WHERE content = old.content);
END;
CREATE TRIGGER content_came AFTER INSERT ON contents BEGIN
    INSERT INTO totals VALUES (new.client, length(new.body) + 256)
    ON CONFLICT (client) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER content_went AFTER DELETE ON contents BEGIN
    UPDATE totals SET bytes = bytes - length(old.body) - 256 WHERE client = old.client;
    DELETE FROM totals WHERE client = old.client AND bytes = 0;
END;
"""
"""Tables and triggers. `cuts` says at which place of a row's body, by its number, which content was taken out."""


@dataclass(frozen=True, slots=True)
class CutBody:
    """A body without its long files."""

    text: bytes
    files: Sequence[tuple[int, bytes]]
    """Places in the text, and the file that belongs there in base64."""


def cut(body: bytes) -> CutBody:
    """Take the long files out of a body. Base64 that would not be encoded to the same text again stays in it."""
    if len(body) < _LEAST:
        return CutBody(body, ())
    texts: list[bytes] = []
    files: list[tuple[int, bytes]] = []
    place = end = 0
    for found in _FILE.finditer(body):
        if len(found[0]) % 4 or b64encode(content := b64decode(found[0])) != found[0]:
            continue
        texts.append(body[end : found.start()])
        place += found.start() - end
        files.append((place, content))
        end = found.end()
    return CutBody(b"".join((*texts, body[end:])), files)


def put_files(connection: sqlite3.Connection, number: int, client: str, files: Iterable[tuple[int, bytes]]) -> None:
    """Store the files of the row with this number, which has none yet."""
    for place, content in files:
        digest = hashlib.sha256(content).digest()
        connection.execute(
            "INSERT INTO contents (client, digest, body) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            (client, digest, content),
        )
        connection.execute(
            "INSERT INTO cuts SELECT ?, ?, number FROM contents WHERE client = ? AND digest = ?",
            (number, place, client, digest),
        )


def whole_bodies(connection: sqlite3.Connection, texts: dict[int, bytes]) -> dict[int, bytes]:
    """The whole bodies of rows, from their texts, both by the rows' numbers."""
    found = connection.execute(
        "SELECT cuts.number, place, contents.body FROM cuts JOIN contents ON contents.number = cuts.content "
        "WHERE cuts.number IN (SELECT value FROM json_each(?)) ORDER BY cuts.number, place",
        (json.dumps(list(texts)),),
    )
    files: dict[int, list[tuple[int, bytes]]] = {}
    for number, place, content in found:
        files.setdefault(number, []).append((place, content))
    return texts | {number: _joined(texts[number], own) for number, own in files.items()}


def _joined(text: bytes, files: Sequence[tuple[int, bytes]]) -> bytes:
    joined: list[bytes] = []
    end = 0
    for place, content in files:
        joined += (text[end:place], b64encode(content))
        end = place
    return b"".join((*joined, text[end:]))
