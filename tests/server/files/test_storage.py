"""Files on disk are complete and listed; others are removed."""

import asyncio
import errno
import logging
import os
import sqlite3
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.api import files
from server.storage import contents
from server.storage.files import Draft, FilesFullError, FilesTable, FileStore, NewFile, Selection
from server.storage.storage import NotStoredError, Storage
from tests.server.files.calling import FILES, LINES, listed, on_disk, running, sent, until_left, uploaded
from tests.server.files.conftest import Clock
from tests.server.helpers import CHAT, chat, client_of, error_of
from tests.waiting import until

OUTPUT = NewFile("", "out.jsonl", "batch_output")


def store_of(app: FastAPI) -> FileStore:
    store = app.state.services.files
    assert isinstance(store, FileStore)
    return store


async def lines(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_what_the_server_writes_is_listed_and_read_as_other_files(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    record = await store_of(app).store(OUTPUT, lines(b"one\n", b"", b"two\n"))
    assert await store_of(app).find("", record.id) == record
    assert store_of(app).path_of(record).read_bytes() == b"one\ntwo\n"
    told = (await client.get(f"{FILES}/{record.id}")).json()
    assert (told["purpose"], told["filename"], told["bytes"], told["expires_at"]) == (
        "batch_output",
        "out.jsonl",
        8,
        None,
    )
    assert (await client.get(f"{FILES}/{record.id}/content")).content == b"one\ntwo\n"
    made = await uploaded(client)
    assert await listed(client, purpose="batch_output") == [record.id]
    assert await listed(client) == [made["id"], record.id]
    assert await store_of(app).list("", Selection(purpose="batch", after="file-0")) is None


async def test_a_file_of_nothing_may_be_written_by_the_server(app: FastAPI, tmp_path: Path) -> None:
    record = await store_of(app).store(OUTPUT, lines())
    assert on_disk(tmp_path) == {record.id: b""}


async def test_pieces_that_fail_leave_nothing(app: FastAPI, tmp_path: Path) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"one\n"
        assert on_disk(tmp_path) != {}
        raise LookupError

    with pytest.raises(LookupError):
        await store_of(app).store(OUTPUT, failing())
    assert on_disk(tmp_path) == {}


async def test_files_are_there_after_a_restart(make_app: Callable[..., FastAPI], tmp_path: Path) -> None:
    app = make_app(data_dir=tmp_path)
    async with running(app) as client:
        made = [await uploaded(client, b"a"), await uploaded(client, b"b")]
    async with running(make_app(data_dir=tmp_path)) as client:
        assert (await client.get(FILES, params={"order": "asc"})).json()["data"] == made
        assert (await client.get(f"{FILES}/{made[1]['id']}/content")).content == b"b"


class CrashError(BaseException):
    """In place of a process that ends."""


def crash(*_: Any, **__: Any) -> None:
    raise CrashError


CRASHES = {
    "while it is written": (contents, "_write", 1),
    "before its name": (os, "fsync", 1),
    "before its name is durable": (contents, "_sync_folder", 1),
    "before it is listed": (FilesTable, "add", 1),
    "while it is deleted": (contents, "_unlink", 0),
}


@pytest.mark.parametrize("when", CRASHES)
async def test_a_crash_leaves_whole_files_or_none(
    make_app: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str
) -> None:
    where, name, num_left = CRASHES[when]
    app = make_app(data_dir=tmp_path)
    record = await store_of(app).store(OUTPUT, lines(LINES))
    with monkeypatch.context() as patch:
        patch.setattr(Draft, "discard", lambda draft: asyncio.to_thread(draft._file.close))
        patch.setattr(where, name, crash)
        with pytest.raises(CrashError):
            await (store_of(app).store(OUTPUT, lines(LINES)) if num_left else store_of(app).delete("", record.id))
    app.state.services.storage.close()
    assert len(on_disk(tmp_path)) == 1 + num_left, "the crash leaves something"
    async with running(make_app(data_dir=tmp_path)) as client:
        await until_left(num_left, tmp_path)
        assert await listed(client) == [record.id] * num_left
        assert on_disk(tmp_path) == ({record.id: LINES} if num_left else {})


async def test_it_is_durable_before_it_is_named_and_named_before_it_is_listed(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def noted(owner: Any, name: str, step: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (steps.append(step), real(*args))[1])

    noted(contents, "_write", "write")
    noted(os, "fsync", "sync")
    noted(Path, "rename", "name")
    noted(FilesTable, "add", "list")
    await store_of(app).store(OUTPUT, lines(LINES))
    assert steps == ["write", "sync", "name", "sync", "list"]


async def test_whoever_is_cancelled_while_it_is_listed_leaves_a_whole_file(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, is_listed = Storage.on, asyncio.Event()

    async def slowly(self: Storage, table: Any, work: Any) -> None:
        await real(self, table, work)
        is_listed.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "on", slowly)
        task = asyncio.ensure_future(store_of(app).store(OUTPUT, lines(LINES)))
        await is_listed.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    (record,) = await store_of(app).list("", Selection()) or ()
    assert on_disk(tmp_path) == {record.id: LINES}


def refusing(number: int, *, after: int = 0) -> Callable[..., None]:
    """A disk that has no room after so many calls."""
    real, calls = contents._write, iter(range(1000))

    def write(*args: Any) -> None:
        if next(calls) >= after:
            raise OSError(number, os.strerror(number))
        real(*args)

    return write


@pytest.mark.parametrize("after", [0, 1])
async def test_a_full_disk_is_told_and_the_server_goes_on(
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    after: int,
) -> None:
    async def form() -> AsyncIterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
        for _ in range(3):
            yield b"x" * 1000

    with monkeypatch.context() as patch:
        patch.setattr(contents, "_write", refusing(errno.ENOSPC, after=after))
        answer = await client.post(FILES, content=form(), headers={"content-type": "multipart/form-data; boundary=b"})
    error = error_of(answer, 500, "server_error")
    assert "No space left on device" in error["message"]
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "No space left on device" in line.getMessage()
    assert line.request_id == answer.headers["x-request-id"]  # type: ignore[attr-defined]
    assert on_disk(tmp_path) == {}
    await uploaded(client)


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "rename"), (Path, "open")])
async def test_a_disk_that_fails(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: Any, name: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        assert "Input/output error" in error_of(await sent(client), 500, "server_error")["message"]
    assert on_disk(tmp_path) == {}
    await uploaded(client)


async def test_a_database_that_fails(
    app: FastAPI, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(FilesTable, "add", fail)
        assert "disk I/O error" in error_of(await sent(client), 500, "server_error")["message"]
    assert on_disk(tmp_path) == {}
    await uploaded(client)


async def test_all_files_together_have_a_bound(make_app: Callable[..., FastAPI], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data_dir": tmp_path, "max_files_mib": 2500 / (1 << 20)}
    async with running(make_app(**settings)) as client:
        first = await uploaded(client, b"x" * 1500)
        error = error_of(await sent(client, b"x" * 1001))
        assert (error["param"], error["code"]) == ("file", "files_limit_exceeded")
        assert "2500 bytes" in error["message"]
        assert "max_files_mib" in error["message"]
        await uploaded(client, b"x" * 1000)
    async with running(make_app(**settings)) as client:
        error_of(await sent(client, b"x"))
        await client.delete(f"{FILES}/{first['id']}")
        await uploaded(client, b"x" * 1500)
        error_of(await sent(client, b"x"))


async def test_what_is_being_written_counts(make_app: Callable[..., FastAPI], tmp_path: Path) -> None:
    store = store_of(make_app(data_dir=tmp_path, max_files_mib=1000 / (1 << 20)))
    async with store.draft() as one:
        await one.write(b"x" * 600)
        async with store.draft() as other:
            with pytest.raises(FilesFullError):
                await other.write(b"x" * 401)
            await other.write(b"x" * 400)
        record = await one.keep(OUTPUT)
    async with store.draft() as other:
        await other.write(b"x" * 400)
        with pytest.raises(NotStoredError):
            await other.write(b"x")
    assert [path.name for path in (tmp_path / "files").iterdir()] == [record.id]


async def test_files_do_not_take_the_room_of_what_else_is_stored(
    make_app: Callable[..., FastAPI], tmp_path: Path
) -> None:
    async with client_of(make_app(data_dir=tmp_path, max_stored_mib=0.001)) as client:
        kept = (await client.post("/v1/conversations", json={})).json()["id"]
        for _ in range(3):
            await uploaded(client, b"x" * 5000)
        assert (await client.get(f"/v1/conversations/{kept}")).status_code == 200


async def test_an_expired_file_is_gone_for_everyone_at_once(
    app: FastAPI, client: httpx.AsyncClient, clock: Clock, tmp_path: Path
) -> None:
    made = await uploaded(client, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
    other = await uploaded(client)
    assert made["expires_at"] == 1_800_000_000 + 3600
    clock.now = made["expires_at"] - 0.1
    assert await listed(client) == [other["id"], made["id"]]
    clock.now = made["expires_at"]
    assert await listed(client) == [other["id"]]
    error_of(await client.get(FILES, params={"after": made["id"]}))
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        error_of(await client.request(method, f"{FILES}/{made['id']}{path}"), 404)
    assert len(on_disk(tmp_path)) == 2
    await store_of(app).sweep()
    assert list(on_disk(tmp_path)) == [other["id"]]
    clock.now = other["created_at"] + 30 * 86400
    assert await listed(client) == []


async def test_expired_files_are_deleted_at_the_start_and_from_time_to_time(
    make_app: Callable[..., FastAPI], clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files, "SWEEP_S", 0.001)
    async with running(make_app(data_dir=tmp_path)) as client:
        made = await uploaded(client)
        clock.now = made["expires_at"]
        await until_left(0, tmp_path)
        made = await uploaded(client)
    clock.now = made["expires_at"]
    assert len(on_disk(tmp_path)) == 1
    monkeypatch.setattr(files, "SWEEP_S", 3600)
    async with running(make_app(data_dir=tmp_path)):
        await until_left(0, tmp_path)


async def test_a_sweep_that_fails_is_tried_again(
    make_app: Callable[..., FastAPI], clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(files, "SWEEP_S", 0.001)
    real, failures = FilesTable.delete_expired, iter([sqlite3.OperationalError("disk I/O error")])

    def delete_expired(*args: Any) -> Any:
        for failure in failures:
            raise failure
        return real(*args)

    monkeypatch.setattr(FilesTable, "delete_expired", delete_expired)
    async with running(make_app(data_dir=tmp_path)) as client:
        clock.now = (await uploaded(client))["expires_at"]
        await until_left(0, tmp_path)
    assert "cannot delete expired files" in caplog.text


async def test_what_has_expired_makes_room(make_app: Callable[..., FastAPI], clock: Clock, tmp_path: Path) -> None:
    async with client_of(make_app(data_dir=tmp_path, max_files_mib=2000 / (1 << 20))) as client:
        made = await uploaded(client, b"x" * 1500)
        error_of(await sent(client, b"x" * 1500))
        clock.now = made["expires_at"]
        await uploaded(client, b"x" * 1500)


async def test_a_large_file_is_on_the_disk_as_it_comes_and_never_in_memory(
    make_app: Callable[..., FastAPI], tmp_path: Path
) -> None:
    piece, num_pieces, goes_on = b"x" * (1 << 18), 128, asyncio.Event()

    async def form() -> AsyncIterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
        for number in range(num_pieces):
            if number == num_pieces // 2:
                await goes_on.wait()
            yield piece
        yield b"\r\n--b--\r\n"

    def size() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "files").iterdir())

    async with client_of(make_app(data_dir=tmp_path)) as client:
        await client.get("/v1/models")
        tracemalloc.start()
        try:
            headers = {"content-type": "multipart/form-data; boundary=b"}
            upload = asyncio.ensure_future(client.post(FILES, content=form(), headers=headers))
            await until(lambda: size() >= (num_pieces // 2 - 1) * len(piece))
            assert await listed(client) == []
            goes_on.set()
            made = (await upload).json()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert made["bytes"] == num_pieces * len(piece)
    assert peak < num_pieces * len(piece) / 4


@pytest.mark.parametrize("name", ["_write", "_sync_folder", "_unlink"])
async def test_a_disk_that_is_slow_keeps_nobody_else_waiting(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = await uploaded(client)
    real, begins, goes_on = getattr(contents, name), threading.Event(), threading.Event()

    def slowly(*args: Any) -> Any:
        begins.set()
        assert goes_on.wait(20), "nobody else was answered"
        return real(*args)

    monkeypatch.setattr(contents, name, slowly)
    waiting = [client.delete(f"{FILES}/{made['id']}")] if name == "_unlink" else [sent(client) for _ in range(40)]
    task = asyncio.gather(*waiting)
    await until(begins.is_set)
    assert (await client.post(CHAT, json=chat())).status_code == 200
    assert len(await listed(client)) == (0 if name == "_unlink" else 1)
    assert not task.done()
    goes_on.set()
    assert {answer.status_code for answer in await task} == {200}
