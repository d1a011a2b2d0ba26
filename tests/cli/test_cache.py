"""`samewise cache ls` and `rm`: what the server keeps, and nothing else."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from server.cli.main import app

MODEL = f"tiny-{'0a' * 8}-3"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with an entry of each kind, and files of somebody else."""
    folder = tmp_path / "cache"
    for name in (
        f"{MODEL}/model.safetensors",
        "native/kernels-2.so",
        "downloads/ab12/m.gguf",
        "kernels-1.so",
        "native/interface-3.py",
        "learnt/cd34/heads-1.safetensors",
        "packed/tiny-7b-0a1b.packed",
        "packed/tiny-7b-0a1b.packedxyz.writing",
        "hashes/ef56",
        "converting-x/model/config.json",
        "notes.txt",
        "photos/me.jpg",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(1024))
    (folder / "downloads" / "ab12" / "source.json").write_text('{"url": "https://example.com/m.gguf"}')
    monkeypatch.setenv("SAMEWISE_CACHE", str(folder))
    return folder


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["cache", *words])


def test_every_kind_is_listed(cache: Path) -> None:
    rows = [line.split("\t") for line in run("ls").stdout.splitlines()]
    assert rows[0] == ["name", "kind", "source", "size", "last used"]
    assert [row[:2] for row in rows[1:]] == [
        [MODEL, "models"],
        ["downloads/ab12", "downloads"],
        ["native/kernels-2.so", "kernels"],
        ["kernels-1.so", "kernels"],
        ["native/interface-3.py", "kernels"],
        ["learnt/cd34", "heads"],
        ["packed/tiny-7b-0a1b.packed", "packed"],
        ["hashes", "hashes"],
        ["converting-x", "unfinished"],
        ["packed/tiny-7b-0a1b.packedxyz.writing", "unfinished"],
    ]
    assert (rows[1][2], rows[1][3], rows[2][2]) == ("tiny", "1.0 KiB", "https://example.com/m.gguf")
    assert rows[7][2] == "tiny-7b"
    first = json.loads(run("ls", "--json").stdout)[0]
    assert (first["name"], first["size"], first["path"]) == (MODEL, 1024, str(cache / MODEL))


def test_entries_are_removed_by_name(cache: Path) -> None:
    done = run("rm", MODEL, "kernels-1.so")
    assert done.stdout == "Removed 2 entries, 2.0 KiB.\n"
    assert not (cache / MODEL).exists()
    assert (cache / "native" / "kernels-2.so").exists()


def test_entries_are_removed_by_kind(cache: Path) -> None:
    assert run("rm", "--kind", "heads").stdout == "Removed 1 entry, 1.0 KiB.\n"
    assert not (cache / "learnt" / "cd34").exists()
    assert (cache / MODEL).exists()


def test_all_leaves_what_is_not_ours(cache: Path) -> None:
    assert run("rm", "--all").stdout.startswith("Removed 10 entries, 10.0 KiB")
    left = sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())
    assert left == ["notes.txt", "photos/me.jpg"]
    assert run("ls").stdout == "name\tkind\tsource\tsize\tlast used\n"


@pytest.mark.parametrize(
    "name", ["notes.txt", "../cache/" + MODEL, "photos", ".", "", "/", "learnt", "downloads/../hashes"]
)
def test_nothing_else_can_be_removed(name: str, cache: Path) -> None:
    failed = run("rm", "--", name)
    assert failed.exit_code == 1
    assert failed.stderr.startswith(f"error: no entry {name} in ")
    assert len(run("ls").stdout.splitlines()) == 11


@pytest.mark.parametrize("words", [[], ["--all", MODEL], ["--all", "--kind", "models"], ["--kind", "photos"]])
def test_what_is_meant_must_be_clear(words: list[str], cache: Path) -> None:
    failed = run("rm", *words)
    assert failed.exit_code == 2
    assert failed.stderr.startswith("error: ")
    assert (cache / MODEL).exists()


def test_a_link_is_removed_and_what_it_links_to_stays(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"x")
    (cache / "learnt" / "link").symlink_to(tmp_path / "outside")
    (cache / MODEL / "config.json").symlink_to(tmp_path / "outside" / "file")
    assert run("rm", "learnt/link", MODEL).stdout == "Removed 2 entries, 1.0 KiB.\n"
    assert (tmp_path / "outside" / "file").exists()


def test_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "none"))
    assert run("ls", "--json").stdout == "[]\n"
    assert run("rm", "--all").stdout == "Removed 0 entries, 0 bytes.\n"
