"""Models of the hub: downloaded into its cache as its own library does, found there again without the network."""

import contextlib
import io
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from rich.console import Console

from model_runner.hub import download, limits
from model_runner.hub.access import HubAccess, ModelNotFoundError
from model_runner.hub.fetch import fetch_model
from model_runner.hub.names import HubName
from model_runner.hub.repository import hash_file, locate_model, resolve_heads, resolve_model
from model_runner.hub.store import RepoCache
from tests.model_runner.hub.fake_hub import COMMIT, OTHER_COMMIT, FakeHub
from tests.model_runner.hub.weights import gguf_bytes, safetensors_bytes

REPO = "user/repo"
NAME = HubName(REPO)
CONFIG = b'{"model_type": "llama"}'
SMALL = {"config.json": CONFIG, "tokenizer.json": b"{}"}
SHARDS = {f"model-0000{number}-of-00002.safetensors": safetensors_bytes(seed=number) for number in (1, 2)}
INDEX = json.dumps({"weight_map": {str(number): name for number, name in enumerate(SHARDS)}}).encode()
OPEN = HubAccess()


@pytest.fixture
def sharded(hub: FakeHub) -> FakeHub:
    others = {"consolidated.safetensors": b"x", "original/model.safetensors": b"x", "README.md": b"x"}
    hub.add(REPO, {**SMALL, **SHARDS, "model.safetensors.index.json": INDEX, **others})
    return hub


def cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def test_the_files_of_a_model_and_no_others(sharded: FakeHub, cache: Path, console: Console) -> None:
    found = fetch_model(NAME, OPEN, console)
    assert found.commit == COMMIT
    assert found.path == cache / "models--user--repo" / "snapshots" / COMMIT
    assert names_in(found.path) == sorted([*SMALL, *SHARDS, "model.safetensors.index.json"])
    assert all((found.path / name).read_bytes() == content for name, content in {**SMALL, **SHARDS}.items())
    assert (cache / "models--user--repo" / "refs" / "main").read_text() == COMMIT
    links = [path for path in found.path.iterdir() if path.is_symlink()]
    assert len(links) == len(names_in(found.path))
    assert all(str(path.readlink()).startswith("../../blobs/") for path in links)


def test_the_hubs_own_library_finds_it(sharded: FakeHub, cache: Path, console: Console) -> None:
    found = fetch_model(NAME, OPEN, console)
    same = huggingface_hub.snapshot_download(
        REPO, cache_dir=cache, local_files_only=True, allow_patterns=["*.json", "model-*.safetensors"]
    )
    assert Path(same) == found.path
    (info,) = huggingface_hub.scan_cache_dir(cache).repos
    assert (info.repo_id, info.nb_files) == (REPO, 5)


def test_a_second_start_asks_nothing(sharded: FakeHub, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch_model(NAME, OPEN, console)
    count = len(sharded.asked)
    assert fetch_model(NAME, OPEN, console).path == first.path
    assert fetch_model(NAME, HubAccess(revision=COMMIT), console).path == first.path
    assert len(sharded.asked) == count
    cannot_connect(monkeypatch)
    assert fetch_model(NAME, OPEN, console).path == first.path
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_model(NAME, HubAccess(updates=True), console).path == first.path


def test_a_pull_takes_the_new_commit(sharded: FakeHub, cache: Path, console: Console) -> None:
    old = fetch_model(NAME, OPEN, console)
    sharded.revisions = {"main": OTHER_COMMIT}
    sharded.add(REPO, {"config.json": b'{"model_type": "qwen3"}'})
    assert fetch_model(NAME, OPEN, console).path == old.path
    count = len(sharded.asked)
    new = fetch_model(NAME, HubAccess(updates=True), console)
    assert new.commit == OTHER_COMMIT
    assert len(sharded.paths("/cdn/")) == len(SHARDS)  # the weights are the same, and are not downloaded again
    assert len(sharded.asked) == count + 2
    assert fetch_model(NAME, OPEN, console).path == new.path
    assert (old.path / "config.json").read_bytes() == CONFIG


def test_an_interrupted_update_leaves_the_old_one(sharded: FakeHub, console: Console) -> None:
    old = fetch_model(NAME, OPEN, console)
    sharded.revisions = {"main": OTHER_COMMIT}
    sharded.add(REPO, {"config.json": b"{}", "model.safetensors.index.json": b"{"})
    with pytest.raises(ModelNotFoundError, match=r"model.safetensors.index.json is not valid JSON"):
        fetch_model(NAME, HubAccess(updates=True), console)
    assert fetch_model(NAME, OPEN, console).path == old.path


def test_a_missing_file_is_downloaded_again(sharded: FakeHub, console: Console) -> None:
    found = fetch_model(NAME, OPEN, console)
    (found.path / "config.json").resolve().unlink()
    shard, other = (found.path / name for name in SHARDS)
    shard.unlink()
    shard.write_bytes(b"short")
    other.resolve().write_bytes(b"cut")
    assert fetch_model(NAME, OPEN, console).path == found.path
    assert other.read_bytes() == SHARDS[other.name]
    assert (found.path / "config.json").read_bytes() == CONFIG
    assert shard.read_bytes() == next(iter(SHARDS.values()))


def test_an_interrupted_download_goes_on(sharded: FakeHub, cache: Path, console: Console) -> None:
    shard = next(iter(SHARDS))
    sharded.cuts[shard] = [500, *[0] * 5]
    with pytest.raises(ModelNotFoundError, match=rf"^user/repo cannot be downloaded: {shard} cannot be downloaded"):
        fetch_model(NAME, OPEN, console)
    (partial,) = (cache / "models--user--repo" / "blobs").glob("*.incomplete")
    size = partial.stat().st_size
    assert 0 < size <= 500
    count = len(sharded.asked)
    fetch_model(NAME, OPEN, console)
    assert [one.range for one in sharded.asked[count:] if shard in one.path and "/cdn/" in one.path] == [
        f"bytes={size}-"
    ]


def test_the_token_goes_to_the_hub_alone(sharded: FakeHub, console: Console) -> None:
    fetch_model(NAME, HubAccess("hf_hush"), console)
    by_place = {(("/cdn/" in one.path), one.token) for one in sharded.asked}
    assert by_place == {(False, "Bearer hf_hush"), (True, None)}


def test_a_gguf_file_by_its_tag(hub: FakeHub, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"m-{tag}.gguf": gguf_bytes(seed=seed) for seed, tag in enumerate(("Q4_K_M", "Q8_0"))}
    parts = {f"big/m-F16-0000{number}-of-00002.gguf": gguf_bytes(seed=number + 5) for number in (1, 2)}
    hub.add(REPO, {**files, **parts, "mmproj-m.gguf": b"x", "README.md": b"x"})
    found = fetch_model(NAME, OPEN, console)
    assert names_in(found.path.parent) == ["m-Q4_K_M.gguf"]
    assert fetch_model(HubName(REPO, "q8_0"), OPEN, console).path.name == "m-Q8_0.gguf"
    split = fetch_model(HubName(REPO, "F16"), OPEN, console).path
    assert names_in(split.parent) == [name.rpartition("/")[2] for name in parts]
    cannot_connect(monkeypatch)
    assert locate_model("user/repo", console)[0] == found.path
    assert locate_model("hf.co/user/repo:F16", console) == (split, "user/repo:F16")
    with pytest.raises(ModelNotFoundError, match=r"the hub cannot be reached"):
        fetch_model(HubName(REPO, "Q6_K"), OPEN, console)


def test_safetensors_come_first(hub: FakeHub, console: Console) -> None:
    hub.add(REPO, {**SMALL, "model.safetensors": safetensors_bytes(), "m-Q8_0.gguf": gguf_bytes()})
    assert names_in(fetch_model(NAME, OPEN, console).path) == sorted([*SMALL, "model.safetensors"])
    assert fetch_model(HubName(REPO, "Q8_0"), OPEN, console).path.name == "m-Q8_0.gguf"


def test_what_other_programs_downloaded_is_used(
    hub: FakeHub, cache: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave no listing, so a file is certain only if a tag names it, or if the rule takes it first."""
    repo = RepoCache(cache, REPO)
    repo.remember("main", COMMIT)
    snapshot = repo.snapshot(COMMIT)
    snapshot.mkdir(parents=True)
    (snapshot / "m-Q8_0.gguf").write_bytes(gguf_bytes())
    hub.add(REPO, {"m-Q8_0.gguf": gguf_bytes(), "m-Q4_K_M.gguf": gguf_bytes(seed=1)})
    assert fetch_model(HubName(REPO, "Q8_0"), OPEN, console).path == snapshot / "m-Q8_0.gguf"
    assert hub.asked == []
    assert fetch_model(NAME, OPEN, console).path == snapshot / "m-Q4_K_M.gguf"
    (repo.folder / "trees" / f"{COMMIT}.json").unlink()
    (snapshot / "m-Q4_K_M.gguf").unlink()
    cannot_connect(monkeypatch)
    assert fetch_model(NAME, OPEN, console).path == snapshot / "m-Q8_0.gguf"
    assert "using commit 0123456789" in console.file.getvalue()  # type: ignore[attr-defined]


def test_without_a_tokenizer_a_snapshot_is_not_trusted(
    hub: FakeHub, cache: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = RepoCache(cache, REPO)
    repo.remember("main", COMMIT)
    repo.snapshot(COMMIT).mkdir(parents=True)
    weights = {"model.safetensors": safetensors_bytes()}
    for name, content in {"config.json": CONFIG, **weights}.items():
        (repo.snapshot(COMMIT) / name).write_bytes(content)
    hub.add(REPO, {**SMALL, **weights})
    fetch_model(NAME, OPEN, console)
    assert (repo.snapshot(COMMIT) / "tokenizer.json").is_file()
    assert hub.paths("/cdn/") == []


def test_heads(hub: FakeHub, console: Console) -> None:
    hub.add("user/heads", {"config.json": b"{}", "heads.pt": b"x", "a/b.pt": b"x", "README.md": b"x"})
    assert names_in(resolve_heads("user/heads", console)) == ["config.json", "heads.pt"]
    with pytest.raises(ModelNotFoundError, match=r"not a hub name such as user/heads"):
        resolve_heads("user/heads:Q8_0", console)


def test_hashes_of_downloads_are_kept(hub: FakeHub, tmp_path: Path, console: Console) -> None:
    content = gguf_bytes(rows=20_000)
    hub.add(REPO, {"m-Q8_0.gguf": content})
    path, _ = locate_model("user/repo:Q8_0", console)
    path.resolve().chmod(0)
    (known,) = (tmp_path / "own" / "hashes").iterdir()
    assert hash_file(path, tmp_path / "own") == known.read_text() == path.resolve().name


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (
            (403, "GatedRepo"),
            "^user/repo is gated on the hub: accept its terms at https://huggingface.co/user/repo, .*HF_TOKEN",
        ),
        ((404, "RevisionNotFound"), "^user/repo has no revision v1 on the hub; its page lists branches and tags$"),
        ((401, "RepoNotFound"), "^user/repo is not a folder or GGUF file .*the hub has no such model; .*--hub-token"),
        ((404, ""), "the hub has no such model"),
        ((403, ""), r"its download from the hub failed \(user/repo: the server answered 403 Forbidden\)$"),
        ((503, ""), r"the hub cannot be reached \(the server answered 503 Service Unavailable\); check the network"),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(
    refusal: tuple[int, str], reason: str, hub: FakeHub, console: Console
) -> None:
    hub.refusal = refusal
    with pytest.raises(ModelNotFoundError, match=reason):
        resolve_model("user/repo", console, HubAccess(revision="v1"))


def test_a_gated_file_is_a_gated_model(hub: FakeHub, console: Console) -> None:
    hub.add(REPO, SMALL | SHARDS)
    hub.failures = [(401, {"x-error-code": "GatedRepo"})] * 4
    with pytest.raises(ModelNotFoundError, match=r"is gated on the hub"):
        fetch_model(NAME, OPEN, console)


def test_revisions(sharded: FakeHub, cache: Path, console: Console) -> None:
    sharded.revisions["refs/pr/1"] = OTHER_COMMIT
    assert fetch_model(NAME, HubAccess(revision="refs/pr/1"), console).commit == OTHER_COMMIT
    assert (cache / "models--user--repo" / "refs" / "refs" / "pr" / "1").read_text() == OTHER_COMMIT
    with pytest.raises(ModelNotFoundError, match=r"has no revision v9"):
        fetch_model(HubName(REPO, revision="v9"), OPEN, console)
    with pytest.raises(ModelNotFoundError, match=r"at v9 by its URL, and at v1 by --revision; leave one out"):
        fetch_model(HubName(REPO, revision="v9"), HubAccess(revision="v1"), console)


def test_offline_without_the_files(sharded: FakeHub, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match=r"does not have all of it, and HF_HUB_OFFLINE forbids its download"):
        fetch_model(NAME, OPEN, console)
    assert sharded.asked == []


def hostile(change: Callable[[dict[str, Any]], object]) -> Callable[[FakeHub], object]:
    def apply(hub: FakeHub) -> None:
        hub.listing = {"sha": COMMIT, "siblings": hub.siblings(REPO)}
        change(hub.listing)

    return apply


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(listing: dict[str, Any]) -> None:
        next(one for one in listing["siblings"] if one["rfilename"] == old)["rfilename"] = new

    return change


def test_an_answer_that_is_no_listing_is_one_line(sharded: FakeHub, console: Console) -> None:
    nested: dict[str, Any] = {}
    for _ in range(100):
        nested = {"siblings": nested}
    for size in (float("inf"), 1.5, "many", nested):
        sharded.listing = {"sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": size, "blobId": "0" * 40}]}
        with pytest.raises(
            ModelNotFoundError, match=r"does not answer like the hub \(.*\); check HF_ENDPOINT"
        ) as failure:
            fetch_model(NAME, OPEN, console)
        assert len(str(failure.value)) < 400


@pytest.mark.parametrize(
    "change",
    [
        lambda listing: listing.update(sha="../../../x"),
        lambda listing: listing.update(siblings=None),
        rename("config.json", "../../../../escaped.json"),
        rename("config.json", "/tmp/escaped.json"),
        rename("config.json", "a\x1b[31m.json"),
        rename("tokenizer.json", "..\\escaped.json"),
        lambda listing: [one.update(blobId="../../escaped", lfs=None) for one in listing["siblings"]],
        lambda listing: [one.update(lfs={"sha256": "../escaped", "size": 1}) for one in listing["siblings"]],
        lambda listing: [one.update(size=-1, lfs=None) for one in listing["siblings"]],
    ],
)
def test_hostile_listings_never_leave_the_cache(
    change: Callable[[dict[str, Any]], object], hub: FakeHub, cache: Path, tmp_path: Path, console: Console
) -> None:
    hub.add(REPO, {**SMALL, "model.safetensors": safetensors_bytes()})
    hostile(change)(hub)
    with contextlib.suppress(ModelNotFoundError):
        fetch_model(NAME, OPEN, console)
    assert not list(tmp_path.rglob("*escaped*"))
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]
    assert all(path.resolve().is_relative_to(cache) for path in cache.rglob("*"))


def test_an_index_names_only_files_of_the_repository(hub: FakeHub, cache: Path, console: Console) -> None:
    for name, reason in (("../../../x.safetensors", "outside of its folder"), ("y.safetensors", "has no file 'y.saf")):
        index = json.dumps({"weight_map": {"a": name}}).encode()
        hub.add(REPO, {**SMALL, **SHARDS, "model.safetensors.index.json": index})
        with pytest.raises(ModelNotFoundError, match=reason):
            fetch_model(NAME, OPEN, console)
        shutil.rmtree(cache)


def test_links_out_of_the_cache_are_not_followed(
    sharded: FakeHub, cache: Path, tmp_path: Path, console: Console
) -> None:
    found = fetch_model(NAME, OPEN, console)
    (tmp_path / "secret").write_bytes(CONFIG)
    (found.path / "config.json").unlink()
    (found.path / "config.json").symlink_to(tmp_path / "secret")
    fetch_model(NAME, OPEN, console)
    assert (found.path / "config.json").resolve().is_relative_to(cache)


def test_a_full_disk_is_noticed_before(sharded: FakeHub, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")(1 << 10)
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        ModelNotFoundError, match=r"^user/repo needs 2.\d KiB in .*, and 1.0 KiB are free there; free some"
    ):
        fetch_model(NAME, OPEN, console)
    assert sharded.paths("/cdn/") == []


def test_a_disk_that_is_full_in_between(sharded: FakeHub, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.Transfers, "fetch", full)
    with pytest.raises(ModelNotFoundError, match=r"^user/repo cannot be stored in .*: No space left on device$"):
        fetch_model(NAME, OPEN, console)


@pytest.mark.parametrize("tag", [None, "Q8_0"])
def test_what_cannot_fit_into_memory_is_not_downloaded(tag: str | None, hub: FakeHub, console: Console) -> None:
    weights = {"model.safetensors": safetensors_bytes(rows=5000), "m-Q8_0.gguf": gguf_bytes(rows=5000)}
    hub.add(REPO, {**SMALL, **weights})
    name = HubName(REPO, tag)
    least = 5000 * 64 * 5 // 8
    with pytest.raises(ModelNotFoundError, match=r"needs at least 19\d.\d KiB of memory for its weights alone, and"):
        fetch_model(name, HubAccess(max_bytes=least - 1), console)
    assert [one.range for one in hub.asked if "/cdn/" in one.path] == ["bytes=0-2097151"]
    fetch_model(name, HubAccess(max_bytes=least + 1000), console)


def test_an_unknown_architecture_is_not_downloaded(hub: FakeHub, cache: Path, console: Console) -> None:
    hub.add(REPO, {"m-Q8_0.gguf": gguf_bytes("mamba")})
    with pytest.raises(ModelNotFoundError, match=r"^user/repo cannot be served, and was not downloaded: .*mamba"):
        fetch_model(NAME, OPEN, console)
    assert not list((cache / "models--user--repo").glob("blobs/*"))


def test_a_long_head_is_read_in_several_steps(hub: FakeHub, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_runner.hub.remote._FIRST", 64)
    hub.add(REPO, {"m-Q8_0.gguf": gguf_bytes("mamba")})
    with pytest.raises(ModelNotFoundError, match=r"mamba"):
        fetch_model(NAME, OPEN, console)
    assert [one.range for one in hub.asked if "/cdn/" in one.path][:3] == ["bytes=0-63", "bytes=0-255", "bytes=0-1023"]


def test_without_symlinks_files_are_moved(sharded: FakeHub, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no symlinks here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    found = fetch_model(NAME, OPEN, console)
    assert fetch_model(NAME, OPEN, console).path == found.path
    assert not (found.path / "config.json").is_symlink()


def test_progress_is_lines_unless_there_is_a_terminal(sharded: FakeHub, cache: Path) -> None:
    for is_terminal in (False, True):
        console = Console(file=io.StringIO(), width=100, force_terminal=is_terminal)
        fetch_model(NAME, OPEN, console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("\x1b[" in text) == is_terminal
        assert ("config.json: 23 bytes" in text) != is_terminal
        shutil.rmtree(cache)
