"""What is kept: in transactions, by owner and parent, the oldest dropped first."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.storage.migrations import StorageError
from server.storage.rows import Row, Rows
from server.storage.storage import FILE, UNFINISHED, NotStoredError, Storage

KIB = 1 << 10


@pytest.fixture(params=["in memory", "on disk"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    kept = Storage(None if request.param == "in memory" else tmp_path / "data", 16 * KIB)
    yield kept
    kept.close()


def row(name: str, body: bytes = b"x", *, client: str = "ann", parent: str = "", state: str = "") -> Row:
    return Row("thing", name, client, body, parent, state)


async def names(storage: Storage) -> list[str]:
    return [one.id for one in await storage.run(lambda rows: rows.of_kind("thing"))]


async def test_a_row_is_its_owners(storage: Storage) -> None:
    await storage.run(lambda rows: rows.put(row("a")))
    assert await storage.run(lambda rows: rows.get("thing", "a", "ann")) == row("a")
    assert await storage.run(lambda rows: rows.get("thing", "a", "bob")) is None
    assert not await storage.run(lambda rows: rows.delete("thing", "a", "bob"))
    assert await names(storage) == ["a"]


async def test_a_row_goes_with_its_parent(storage: Storage) -> None:
    await storage.run(lambda rows: rows.put(row("a"), row("b", parent="a"), row("c", parent="a"), row("d")))
    await storage.run(lambda rows: rows.put(row("b", b"changed", parent="a")))
    children = await storage.run(lambda rows: rows.of_parent("thing", "a"))
    assert [(one.id, one.body) for one in children] == [("b", b"changed"), ("c", b"x")]
    assert await storage.run(lambda rows: rows.delete("thing", "a", "ann"))
    assert await names(storage) == ["d"]


async def test_what_fails_has_written_nothing(storage: Storage) -> None:
    def fail(rows: Rows) -> None:
        rows.put(row("a"))
        raise LookupError

    with pytest.raises(LookupError):
        await storage.run(fail)
    assert await names(storage) == []


async def test_the_oldest_are_dropped_with_what_is_theirs(storage: Storage) -> None:
    await storage.run(lambda rows: rows.put(row("promised", state=UNFINISHED), row("old"), row("used"), row("idle")))
    await storage.run(lambda rows: rows.put(row("part", b"x" * 4 * KIB, parent="old")))
    await storage.run(lambda rows: rows.renew("thing", "used"))
    await storage.run(lambda rows: rows.put(row("new", b"x" * 15 * KIB)))
    assert await names(storage) == ["promised", "used", "new"]


async def test_what_is_written_is_not_dropped_for_its_age(storage: Storage) -> None:
    await storage.run(lambda rows: rows.put(row("a"), row("b", b"x" * 12 * KIB)))
    await storage.run(lambda rows: rows.put(row("part", b"x" * 8 * KIB, parent="a")))
    assert await names(storage) == ["a", "part"]


async def test_what_is_too_large_drops_nothing(storage: Storage) -> None:
    await storage.run(lambda rows: rows.put(row("a"), row("b")))
    for large in (row("large", b"x" * 16 * KIB), row("part", b"x" * 16 * KIB, parent="b")):
        with pytest.raises(NotStoredError):
            await storage.run(lambda rows, large=large: rows.put(large))
    assert await names(storage) == ["a", "b"]


async def test_a_full_disk_is_told(storage: Storage) -> None:
    await storage.run(lambda rows: rows.put(row("a")))
    await storage.run(lambda rows: rows._connection.execute("PRAGMA max_page_count = 1"))
    with pytest.raises(NotStoredError, match="full"):
        await storage.run(lambda rows: rows.put(row("b", b"x" * 15 * KIB)))
    assert await names(storage) == ["a"]


async def test_of_what_is_in_use_the_older_half_is_renewed(storage: Storage) -> None:
    await storage.run(lambda rows: rows.put(*(row(name) for name in "abcdef")))
    for name in "ae":
        await storage.run(lambda rows, name=name: rows.renew_old("thing", name))
    assert await names(storage) == ["b", "c", "d", "e", "f", "a"]


async def test_what_was_deleted_makes_room(storage: Storage) -> None:
    for _ in range(9):
        await storage.run(lambda rows: rows.put(row("a", b"x" * 8 * KIB), row("b", b"x" * 4 * KIB)))
        await storage.run(lambda rows: rows.put(row("a", b"x")))
        assert set(await names(storage)) == {"a", "b"}
        await storage.run(lambda rows: rows.delete("thing", "a", "ann"))


async def test_it_is_there_again(tmp_path: Path) -> None:
    for expected in ([], ["a"]):
        storage = Storage(tmp_path, KIB)
        assert await names(storage) == expected
        await storage.run(lambda rows: rows.put(row("a")))
        storage.close()


def test_what_is_no_database_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"x" * 4096)
    with pytest.raises(StorageError, match="file is not a database"):
        Storage(tmp_path, KIB)


def test_a_newer_one_is_left_alone(tmp_path: Path) -> None:
    Storage(tmp_path, KIB).close()
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StorageError, match="version 99"):
        Storage(tmp_path, KIB)
