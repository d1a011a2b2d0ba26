"""Downloads of files: resumed, checked, refused."""

import fcntl
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from model_runner.hub import transfer
from model_runner.hub.transfer import Item, RefusedError, TransferError, Transfers, UnreachableError, get
from tests.model_runner.hub.fake_hub import FakeHub

CONTENT = bytes(range(256)) * 40_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Told:
    """Keeps all calls."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.waits = threading.Event()

    def start(self, name: str, size: int | None, done: int) -> None:
        self.events.append(("start", name, size, done))

    def advance(self, name: str, num_bytes: int) -> None:
        self.events.append(("advance", num_bytes))

    def finish(self, name: str) -> None:
        self.events.append(("finish", name))

    def note(self, text: str) -> None:
        self.events.append(("note", text))
        self.waits.set()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(follow_redirects=True) as made:
        yield made


@pytest.fixture
def item(hub: FakeHub, tmp_path: Path) -> Item:
    hub.files["/file.gguf"] = CONTENT
    return Item("file.gguf", f"{hub.url}/file.gguf", tmp_path / "blob", tmp_path / "lock", len(CONTENT), SHA256)


def other(item: Item, **changes: object) -> Item:
    return replace(item, **changes)  # type: ignore[arg-type]


def test_a_file_arrives_whole(item: Item, client: httpx.Client, told: Told) -> None:
    assert Transfers(client, told).fetch(item) == SHA256
    assert item.target.read_bytes() == CONTENT
    assert not item.partial.exists()
    assert told.events[0] == ("start", "file.gguf", len(CONTENT), 0)
    assert told.events[-1] == ("finish", "file.gguf")
    assert sum(event[1] for event in told.events if event[0] == "advance") == len(CONTENT)  # type: ignore[misc]


def test_a_cut_connection_is_continued(item: Item, client: httpx.Client, told: Told, hub: FakeHub) -> None:
    hub.cuts["file.gguf"] = [3_000_000, 0, 100]
    assert Transfers(client, told).fetch(item) == SHA256
    ranges = [one.range for one in hub.asked]
    assert ranges[0] is None
    assert ranges[1] == ranges[2]
    starts = [int(text.removeprefix("bytes=").removesuffix("-")) for text in ranges[1:] if text]
    assert 0 < starts[0] <= 3_000_000
    assert item.target.read_bytes() == CONTENT


def test_it_is_continued_after_a_restart(item: Item, client: httpx.Client, told: Told, hub: FakeHub) -> None:
    item.partial.write_bytes(CONTENT[:1_234_567])
    assert Transfers(client, told).fetch(item) == SHA256
    assert [one.range for one in hub.asked] == ["bytes=1234567-"]
    assert told.events[0] == ("start", "file.gguf", len(CONTENT), 1_234_567)


def test_what_was_complete_needs_no_request(item: Item, client: httpx.Client, told: Told, hub: FakeHub) -> None:
    item.partial.write_bytes(CONTENT)
    assert Transfers(client, told).fetch(item) == SHA256
    item.partial.write_bytes(b"junk")
    assert Transfers(client, told).fetch(item) == ""
    assert hub.asked == []


@pytest.mark.parametrize("left", [b"wrong" + CONTENT[5:1000], CONTENT + b"more"])
def test_a_wrong_beginning_is_downloaded_again(
    left: bytes, item: Item, client: httpx.Client, told: Told, hub: FakeHub
) -> None:
    item.partial.write_bytes(left)
    assert Transfers(client, told).fetch(item) == SHA256
    assert hub.asked[-1].range is None
    assert item.target.read_bytes() == CONTENT


def test_wrong_content_never_gets_the_name(item: Item, client: httpx.Client, told: Told, hub: FakeHub) -> None:
    hub.files["/file.gguf"] = CONTENT[:-1] + b"x"
    with pytest.raises(TransferError, match=r"arrived twice with another content than its checksum says"):
        Transfers(client, told).fetch(item)
    assert len(hub.asked) == 2
    assert not item.target.exists()
    assert not item.partial.exists()


def test_small_files_are_checked_by_gits_hash(item: Item, client: httpx.Client, told: Told, hub: FakeHub) -> None:
    hub.files["/file.gguf"] = b"{}"
    git = hashlib.sha1(b"blob 2\0{}").hexdigest()
    assert Transfers(client, told).fetch(other(item, size=2, sha256=None, git_hash=git))
    item.target.unlink()
    with pytest.raises(TransferError, match=r"another content"):
        Transfers(client, told).fetch(other(item, size=2, sha256=None, git_hash="0" * 40))


def test_a_server_without_ranges_sends_all_again(item: Item, client: httpx.Client, told: Told, hub: FakeHub) -> None:
    hub.ignores_ranges = True
    hub.cuts["file.gguf"] = [3_000_000]
    assert Transfers(client, told).fetch(item) == SHA256
    assert item.target.read_bytes() == CONTENT


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_server_is_asked_again(
    status: int, item: Item, client: httpx.Client, told: Told, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_FIRST_WAIT_S", 3600.0)  # the server's own word comes first
    hub.failures = [(status, {"retry-after": "0"}), (status, {"retry-after": "0"})]
    assert Transfers(client, told).fetch(item) == SHA256


def test_the_wait_that_the_server_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_FIRST_WAIT_S", 1.0)
    asked = {"retry-after": "7"}, {"ratelimit": '"resolvers";r=0;t=9'}, {"retry-after": "900"}, {}
    waits = []
    for headers in asked:
        with pytest.raises(transfer._LostError) as lost:
            transfer.check_status(httpx.Response(429, headers=headers), "x")
        waits.append(transfer._pause(3, lost.value))
    assert waits == [7.0, 9.0, 60.0, 4.0]


@pytest.mark.parametrize("number", ["9" * 5000, "²", "1_0", "-1", " 1", ""])
def test_headers_that_are_no_numbers(number: str) -> None:
    """A test of the reader would not show which headers go through it."""
    coded = {name: number.encode("latin-1") for name in ("retry-after", "content-length")}
    coded |= {"content-range": f"bytes {number}-9/10".encode("latin-1"), "ratelimit": f"t={number}".encode("latin-1")}
    assert transfer._wait_of(httpx.Response(429, headers=coded)) is None
    assert transfer._extent(httpx.Response(200, headers=coded)) == (0, None)
    with pytest.raises(TransferError, match="a part of the file without saying which"):
        transfer._extent(httpx.Response(206, headers=coded))


def test_it_gives_up_and_can_be_resumed(item: Item, client: httpx.Client, told: Told, hub: FakeHub) -> None:
    hub.cuts["file.gguf"] = [2_000_000, *[0] * 5]
    with pytest.raises(TransferError, match=r"cannot be downloaded: .*; run it again to resume"):
        Transfers(client, told).fetch(item)
    left = item.partial.read_bytes()
    assert left
    assert CONTENT.startswith(left)
    assert Transfers(client, told).fetch(item) == SHA256


@pytest.mark.parametrize(("status", "code"), [(401, "GatedRepo"), (403, ""), (404, "EntryNotFound")])
def test_a_refusal_is_final(status: int, code: str, item: Item, client: httpx.Client, told: Told, hub: FakeHub) -> None:
    hub.failures = [(status, {"x-error-code": code, "x-error-message": "no\x07t for you"})]
    with pytest.raises(RefusedError) as refusal:
        Transfers(client, told).fetch(item)
    assert (refusal.value.status, refusal.value.code) == (status, code)
    assert "not for you" in str(refusal.value)
    assert len(hub.asked) == 1


@pytest.mark.parametrize(
    ("kind", "content", "reason"),
    [
        ("text/html; charset=utf-8", b"<html>please log in", "web page instead of the file; check the address"),
        ("application/octet-stream", b"<!DOCTYPE html><p>", "web page instead of the file"),
        ("text/plain", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer instead"),
        ("application/json", b'{"error": 1}', "another content than the file; it has 12 bytes instead of 10,240,000"),
    ],
)
def test_what_comes_instead_of_a_file_is_named(
    kind: str, content: bytes, reason: str, item: Item, client: httpx.Client, told: Told, hub: FakeHub
) -> None:
    hub.sent_instead["file.gguf"] = kind, content
    with pytest.raises(TransferError, match=reason):
        Transfers(client, told).fetch(item)
    with pytest.raises(TransferError, match=reason.partition(";")[0]):
        Transfers(client, told).fetch(other(item, size=len(content), sha256=None, magic=b"GGUF"))
    assert not item.target.exists()


def test_two_downloads_of_a_file_are_one(item: Item, client: httpx.Client, told: Told, hub: FakeHub) -> None:
    item.lock.touch()
    with item.lock.open() as other_process:
        fcntl.flock(other_process, fcntl.LOCK_EX)
        thread = threading.Thread(target=Transfers(client, told).fetch, args=(item,))
        thread.start()
        assert told.waits.wait(60)
        item.target.write_bytes(CONTENT)
    thread.join()
    assert hub.asked == []
    assert told.events == [("note", "Another process downloads file.gguf; waiting ...")]


def test_a_stop_keeps_what_has_arrived(item: Item, client: httpx.Client, hub: FakeHub) -> None:
    stop = threading.Event()

    class Stopping(Told):
        def advance(self, name: str, num_bytes: int) -> None:
            stop.set()

    with pytest.raises(TransferError, match=r"stopped; run it again to resume"):
        Transfers(client, Stopping(), stop).fetch(item)
    assert 0 < item.partial.stat().st_size < len(CONTENT)


def test_small_requests(hub: FakeHub, client: httpx.Client) -> None:
    hub.files["/x"] = b"12345"
    hub.failures = [(503, {})]
    assert get(client, f"{hub.url}/x", "x", 3).content == b"123"
    with pytest.raises(RefusedError, match=r"x: the server answered 404"):
        get(client, f"{hub.url}/y", "x")
    hub.failures = [(503, {})] * 3
    with pytest.raises(UnreachableError, match=r"503"):
        get(client, f"{hub.url}/x", "x")
    with pytest.raises(UnreachableError, match=r"ConnectError"):
        get(client, "http://127.0.0.1:1/x", "x")


def test_a_file_without_end_is_refused(item: Item, client: httpx.Client, told: Told, hub: FakeHub) -> None:
    """Without a length in the answer, the end of the connection is the end of the file."""
    hub.hides_lengths = True
    with pytest.raises(TransferError, match="has more than the 1,000 bytes that were announced"):
        Transfers(client, told).fetch(other(item, size=1000))
    assert item.partial.stat().st_size <= 1000
    hub.ignores_ranges = True
    hub.files["/file.gguf"] = CONTENT[:1000]
    with pytest.raises(TransferError, match="the connection was closed early; run it again to resume"):
        Transfers(client, told).fetch(other(item, size=2000))


def test_answers_that_never_come_further_end(item: Item, client: httpx.Client, told: Told, hub: FakeHub) -> None:
    hub.ignores_ranges = True
    hub.cuts["file.gguf"] = [3_000_000, *[2_000_000, 1_000_000] * 5]
    with pytest.raises(TransferError, match="run it again to resume"):
        Transfers(client, told).fetch(item)
    assert len(hub.asked) == 6
