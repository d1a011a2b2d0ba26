"""GGUF files of URLs outside of the hub."""

import hashlib
from pathlib import Path

import pytest
from rich.console import Console

from model_runner.hub.access import HubAccess, ModelNotFoundError
from model_runner.hub.fetch import fetch_url
from model_runner.hub.names import FileUrl
from model_runner.hub.repository import cache_folder, locate_model
from tests.model_runner.hub.fake_hub import FakeHub
from tests.model_runner.hub.weights import gguf_bytes

CONTENT = gguf_bytes(rows=2000)
OPEN = HubAccess()


@pytest.fixture
def url(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FileUrl:
    """A file on a server that is not the hub."""
    monkeypatch.delenv("HF_ENDPOINT")
    hub.files["/a/small model.gguf"] = CONTENT
    hub.files["/a/small%20model.gguf"] = CONTENT
    hub.etags["/a/small%20model.gguf"] = '"v1"'
    return FileUrl(f"{hub.url}/a/small%20model.gguf?download=true")


def fetch(url: FileUrl, console: Console, access: HubAccess = OPEN) -> Path:
    return fetch_url(url, cache_folder(), access, console).path


def test_it_is_downloaded_once(url: FileUrl, hub: FakeHub, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_hush")
    path, name = locate_model(url.url, console)
    assert (path.name, name) == ("small model.gguf", "small model")
    assert path.read_bytes() == CONTENT
    count = len(hub.asked)
    assert fetch(url, console) == path
    assert len(hub.asked) == count
    assert {one.token for one in hub.asked} == {None}


def test_it_is_resumed_unless_it_has_changed(url: FileUrl, hub: FakeHub, console: Console) -> None:
    hub.cuts["small%20model.gguf"] = [len(CONTENT), 100_000, *[0] * 5]
    with pytest.raises(ModelNotFoundError, match=r"run it again to resume"):
        fetch(url, console)
    path = fetch(url, console)
    assert path.read_bytes() == CONTENT
    assert hub.asked[-1].range not in (None, "bytes=0-2097151")
    path.rename(path.with_name(f"{path.name}.incomplete"))
    hub.files["/a/small%20model.gguf"] = changed = gguf_bytes(rows=2000, seed=7)
    hub.etags["/a/small%20model.gguf"] = '"v2"'
    assert fetch(url, console).read_bytes() == changed


def test_a_pull_looks_for_a_newer_one(url: FileUrl, hub: FakeHub, console: Console) -> None:
    path = fetch(url, console)
    count = len(hub.asked)
    assert fetch(url, console, HubAccess(updates=True)) == path
    assert len(hub.asked) == count + 1
    hub.files["/a/small%20model.gguf"] = changed = gguf_bytes(rows=9)
    hub.etags["/a/small%20model.gguf"] = '"v2"'
    assert fetch(url, console) == path
    assert fetch(url, console, HubAccess(updates=True)).read_bytes() == changed


def test_all_parts_are_downloaded(hub: FakeHub, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT")
    for number in (1, 2):
        hub.files[f"/big-0000{number}-of-00002.gguf"] = gguf_bytes(seed=number)
    path = fetch(FileUrl(f"{hub.url}/big-00002-of-00002.gguf"), console)
    assert path.name == "big-00001-of-00002.gguf"
    assert path.with_name("big-00002-of-00002.gguf").read_bytes() == gguf_bytes(seed=2)


def test_a_checksum_of_the_server_is_checked(url: FileUrl, hub: FakeHub, console: Console) -> None:
    hub.etags["/a/small%20model.gguf"] = f'"{hashlib.sha256(b"another").hexdigest()}"'
    with pytest.raises(ModelNotFoundError, match=r"arrived twice with another content"):
        fetch(url, console)


@pytest.mark.parametrize(
    ("access", "reason"),
    [
        (HubAccess(revision="v1"), "^revision v1 applies to models of the hub, not to a URL; leave it out$"),
        (HubAccess(max_bytes=1000), "needs at least .* of memory"),
    ],
)
def test_refusals(access: HubAccess, reason: str, url: FileUrl, console: Console) -> None:
    with pytest.raises(ModelNotFoundError, match=reason):
        fetch(url, console, access)


def test_what_is_not_there(hub: FakeHub, url: FileUrl, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"cannot be downloaded: .* 404 Not Found; check the address$"):
        fetch(FileUrl(f"{hub.url}/none.gguf"), console)
    with pytest.raises(ModelNotFoundError, match=r"cannot be reached: ConnectError"):
        fetch(FileUrl("http://127.0.0.1:1/none.gguf"), console)
    hub.sent_instead["small%20model.gguf"] = "text/html", b"<html>"
    with pytest.raises(ModelNotFoundError, match=r"small model.gguf is not a GGUF file"):
        fetch(url, console)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match=r"was not downloaded before, and HF_HUB_OFFLINE forbids"):
        fetch(url, console)


def test_a_signature_is_neither_kept_nor_needed_again(url: FileUrl, hub: FakeHub, console: Console) -> None:
    path = fetch(FileUrl(url.url.replace("download=true", "signature=hush")), console)
    assert "signature=hush" in hub.asked[-1].path
    assert "hush" not in (path.parent / "source.json").read_text()
    assert fetch(url, console) == path
