"""Storage: in transactions, by owner and parent, dropping the oldest first."""

import os
import sqlite3
import stat
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.storage import storage as database
from server.storage.contents import Contents
from server.storage.rows import UNFINISHED, Row, Rows
from server.storage.storage import FILE, NotStoredError, PromisesFullError, Storage, StorageError, TooLargeToStoreError

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


async def test_nobody_else_reads_what_is_stored(tmp_path: Path) -> None:
    folder, there = tmp_path / "data", tmp_path / "there"
    there.mkdir(mode=0o755)
    (there / FILE).touch(mode=0o644)
    (there / "files").mkdir(mode=0o755)
    for one in (folder, there):
        kept = Storage(one, 16 * KIB)
        await kept.run(lambda rows: rows.put(row("a")))
        contents = Contents(one / "files")
        file = await contents.create("file-a")
        assert [stat.S_IMODE(path.stat().st_mode) for path in one.glob("files/*")] == [0o600]
        assert {stat.S_IMODE(path.stat().st_mode) for path in one.glob(f"{FILE}*")} == {0o600}
        assert stat.S_IMODE((one / "files").stat().st_mode) == 0o700
        file.close()
        contents.close()
        kept.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_row_goes_with_its_parent(storage: Storage) -> None:
    await storage.run(lambda rows: rows.put(row("a"), row("b", parent="a"), row("c", parent="a"), row("d")))
    await storage.run(lambda rows: rows.put(row("b", b"changed", parent="a")))
    children = await storage.run(lambda rows: rows.of_parent("thing", "a"))
    assert [(one.id, one.body) for one in children] == [("b", b"changed"), ("c", b"x")]
    assert await storage.run(lambda rows: rows.delete("thing", "a", "ann"))
    assert await names(storage) == ["d"]


async def test_some_of_a_parent_come_in_their_order_from_behind_one(storage: Storage) -> None:
    parts = [row(name, parent="a", state="odd" if name == "d" else "") for name in "bcdef"]
    await storage.run(lambda rows: rows.put(row("a"), *parts, row("of another", parent="z")))

    async def some(after: str | None, *, newest_first: bool, limit: int) -> str | None:
        found = await storage.run(
            lambda rows: rows.some_of_parent("thing", "a", "", after=after, newest_first=newest_first, limit=limit)
        )
        return None if found is None else "".join(one.id for one in found)

    assert await some(None, newest_first=False, limit=2) == "bc"
    assert await some("c", newest_first=False, limit=9) == "ef"
    assert await some(None, newest_first=True, limit=3) == "fec"
    assert await some("c", newest_first=True, limit=3) == "b"
    assert await some("b", newest_first=True, limit=3) == ""
    for unknown in ("none", "a", "d", "of another"):
        assert await some(unknown, newest_first=True, limit=3) is None


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


async def test_what_one_client_writes_drops_nothing_of_another_s_share(storage: Storage) -> None:
    await storage.run(lambda rows: rows.put(*(row(f"bob {n}", b"x" * KIB, client="bob") for n in range(5))))
    for number in range(30):
        await storage.run(lambda rows, number=number: rows.put(row(f"ann {number}", b"x" * KIB)))
    kept = await names(storage)
    assert [name for name in kept if name.startswith("bob")] == [f"bob {n}" for n in range(5)]
    assert [name for name in kept if name.startswith("ann")] == [f"ann {n}" for n in range(23, 30)]


async def test_room_that_others_leave_is_given_back_by_who_has_most_for_its_weight(tmp_path: Path) -> None:
    storage = Storage(tmp_path, 16 * KIB, weight_of=lambda client: 3.0 if client == "bob" else 1.0)
    for client in ("ann", "bob"):
        for number in range(20):
            one = row(f"{client} {number}", b"x" * 768, client=client)
            await storage.run(lambda rows, one=one: rows.put(one))
    kept = await names(storage)
    assert kept == [f"ann {number}" for number in range(16, 20)] + [f"bob {number}" for number in range(8, 20)]
    with pytest.raises(TooLargeToStoreError, match="room for 4096"):
        await storage.run(lambda rows: rows.put(row("large", b"x" * 5 * KIB)))
    assert await names(storage) == kept
    storage.close()


def with_files(*files: bytes) -> bytes:
    """A body with these files in data URLs."""
    return b"".join(b'{"url": "data:image/png;base64,%b"}\n' % b64encode(file) for file in files)


async def test_a_file_is_kept_once_until_its_last_use(storage: Storage) -> None:
    files = [bytes([number]) * (3 * KIB + number) for number in range(1, 4)]
    bodies = {name: with_files(files[0], files[1], files[0]) for name in "abcdefgh"}
    await storage.run(lambda rows: rows.put(*(row(name, body) for name, body in bodies.items())))
    assert await storage.run(lambda rows: rows.num_bytes()) < 12 * KIB, "within 16 KiB, in which they fit only once"
    await storage.run(lambda rows: rows.renew("thing", "a"))
    assert {one.id: one.body for one in await storage.run(lambda rows: rows.of_kind("thing"))} == bodies
    await storage.run(lambda rows: rows.put(row("a", with_files(files[2]))))
    assert (await storage.run(lambda rows: rows.get("thing", "a", "ann"))).body == with_files(files[2])
    for name in "bcdefgh":
        assert await storage.run(lambda rows: rows.num_bytes()) > 9 * KIB
        await storage.run(lambda rows, name=name: rows.delete("thing", name, "ann"))
    assert await storage.run(lambda rows: rows.num_bytes()) < 4 * KIB
    await storage.run(lambda rows: rows.delete("thing", "a", "ann"))
    assert await storage.run(lambda rows: rows.bytes_by_client()) == {}


async def test_each_client_has_its_own_files(storage: Storage) -> None:
    for client in ("ann", "bob"):
        body = with_files(b"x" * 5 * KIB)
        await storage.run(lambda rows, client=client, body=body: rows.put(row(client, body, client=client)))
    assert len(set((await storage.run(lambda rows: rows.bytes_by_client())).values())) == 1
    with pytest.raises(TooLargeToStoreError):
        await storage.run(lambda rows: rows.put(row("more", with_files(b"y" * 17 * KIB))))


@pytest.mark.parametrize("file", ["QQ" * 4096 + "B=", "QUJD" * 2048 + "QQ", "QQ==" * 2048, "QU\\nJD" * 2048])
async def test_base64_of_another_form_is_kept_as_it_is(storage: Storage, file: str) -> None:
    body = f'{{"url": "data:image/png;base64,{file}"}}'.encode()
    await storage.run(lambda rows: rows.put(row("a", body)))
    assert (await storage.run(lambda rows: rows.get("thing", "a", "ann"))).body == body
    assert await storage.run(lambda rows: rows.num_bytes()) == len(body) + 256


def promise(name: str, client: str = "ann") -> Callable[[Rows], None]:
    """An unfinished row, which has 2 KiB with its part."""
    one = row(name, b"x" * 512, client=client, state=UNFINISHED)
    return lambda rows: rows.put(one, row("job", b"x" * KIB, client=client, parent=name))


async def test_promises_leave_room_for_what_comes_of_them(storage: Storage) -> None:
    for number in range(4):
        await storage.run(promise(f"{number}"))
    with pytest.raises(PromisesFullError, match="would take 10240 bytes") as caught:
        await storage.run(promise("more"))
    assert caught.value.status == 429
    await storage.run(lambda rows: rows.put(row("0", b"x" * 6 * KIB, state="done")))
    await storage.run(promise("4"))
    assert await storage.run(lambda rows: rows.get("thing", "0", "ann")) is not None, "promises drop nothing"


async def test_one_client_s_promises_keep_no_other_s_out(storage: Storage) -> None:
    for number in range(4):
        await storage.run(promise(f"{number}"))
    for number in (5, 6):
        await storage.run(promise(f"{number}", "bob"))
    for client in ("ann", "bob"):
        with pytest.raises(PromisesFullError, match="limit is 4096"):
            await storage.run(promise("more", client))
    await storage.run(promise("first", "cid"))


async def test_what_an_older_server_stored_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sqlite3.connect(tmp_path / FILE, isolation_level=None) as connection:
        monkeypatch.setattr(database, "_STEPS", database._STEPS[:4])
        database.migrate(connection)
        put = "INSERT INTO rows (kind, id, client, parent, state, body) VALUES ('thing', ?, 'ann', ?, ?, zeroblob(?))"
        connection.executemany(put, [("a", "", UNFINISHED, 100), ("job", "a", "", 200), ("b", "", "done", 400)])
    connection.close()
    monkeypatch.undo()
    storage = Storage(tmp_path, 16 * KIB)
    assert await storage.run(lambda rows: rows.bytes_by_client()) == {"ann": 700 + 3 * 256}
    assert await storage.run(lambda rows: rows.promised_by_client()) == {"ann": 300 + 2 * 256}
    assert await storage.run(lambda rows: rows.delete("thing", "a", "ann"))
    assert await storage.run(lambda rows: rows.num_bytes()) == 400 + 256
    storage.close()


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


PAGE = 4096
DAMAGE = {
    "no header": lambda data: bytes(PAGE) + data[PAGE:],
    "no schema": lambda data: data[:100] + bytes(PAGE - 100) + data[PAGE:],
    "cut off": lambda data: data[: len(data) // 2],
    "a page of zeros": lambda data: data[: 60 * PAGE] + bytes(PAGE) + data[61 * PAGE :],
    "a page of noise": lambda data: data[: 60 * PAGE] + os.urandom(PAGE) + data[61 * PAGE :],
    "an index of zeros": lambda data: data[: 2 * PAGE] + bytes(PAGE) + data[3 * PAGE :],
}


@pytest.mark.parametrize("kind", DAMAGE)
async def test_what_is_damaged_ends_the_start(tmp_path: Path, kind: str) -> None:
    storage = Storage(tmp_path, KIB * KIB)
    await storage.run(lambda rows: rows.put(*(row(f"{number}", b"x" * KIB) for number in range(300))))
    storage.close()
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(DAMAGE[kind](data))
    with pytest.raises(StorageError, match=r"Cannot use .*: (it is damaged|database disk image|file is not)"):
        Storage(tmp_path, KIB * KIB)
    (tmp_path / FILE).write_bytes(data)
    Storage(tmp_path, KIB * KIB).close()


def test_a_newer_one_is_left_alone(tmp_path: Path) -> None:
    Storage(tmp_path, KIB).close()
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StorageError, match="version 99"):
        Storage(tmp_path, KIB)
