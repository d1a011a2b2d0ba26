"""`samewise list`, `pull` and `show`, against a hub on this machine."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from model_runner.hub import repository, transfer
from server.cli import models
from server.cli.main import app
from tests.model_runner.hub.fake_hub import COMMIT, OTHER_COMMIT, FakeHub, running
from tests.model_runner.hub.weights import gguf_bytes, safetensors_bytes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"chat_template": "x"}',
    "model.safetensors": safetensors_bytes(rows=100),
    "m-Q8_0.gguf": gguf_bytes(rows=100),
}


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(transfer, "_FIRST_WAIT_S", 0.0)
    with running() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        made.add("user/repo", FILES)
        yield made


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def test_a_model_is_pulled_listed_and_shown(hub: FakeHub, tmp_path: Path) -> None:
    pulled = run("pull", "user/repo:Q8_0")
    assert pulled.exit_code == 0
    path = Path(pulled.stdout.strip())
    assert path.read_bytes() == FILES["m-Q8_0.gguf"]
    assert "m-Q8_0.gguf: 7.4 KiB" in pulled.stderr
    rows = [line.split("\t") for line in run("list").stdout.splitlines()]
    assert rows[0] == ["name", "revision", "format", "size", "from", "date"]
    assert [row[:5] for row in rows[1:]] == [["user/repo:Q8_0", "", "GGUF", "7.4 KiB", "hub"]]
    (listed,) = json.loads(run("list", "--json").stdout)
    assert (listed["path"], listed["size"]) == (str(path), len(FILES["m-Q8_0.gguf"]))
    shown = run("show", "user/repo:Q8_0").stdout
    assert f"on this machine  {path}\n" in shown
    assert "Q8_0 99.0 %, F32 1.0 %" in shown
    assert "context          256 tokens" in shown


def test_a_pull_asks_for_the_newest_commit(hub: FakeHub) -> None:
    first = run("pull", "user/repo").stdout
    hub.revisions["main"] = OTHER_COMMIT
    assert COMMIT in first
    assert OTHER_COMMIT in run("pull", "user/repo").stdout
    assert OTHER_COMMIT in run("pull", "user/repo", "--revision", "main", "--hub-token", "hf_hush").stdout
    assert hub.asked[-1].token == "Bearer hf_hush"


@pytest.mark.parametrize("name", ["user/repo", "user/repo:Q8_0"])
def test_only_heads_are_read_of_what_is_not_here(name: str, hub: FakeHub, tmp_path: Path) -> None:
    shown = run("show", name)
    assert shown.exit_code == 0, shown.stderr
    assert "on this machine  no\n" in shown.stdout
    assert "chat template    yes" in shown.stdout
    assert "parameters       6,4" in shown.stdout
    assert not (tmp_path / "hf" / "hub").exists()
    found = json.loads(run("show", name, "--json").stdout)
    assert found["path"] is None
    assert found["types"] == ({"F16": 6400} if name == "user/repo" else {"Q8_0": 6400, "F32": 64})


def test_a_url_is_shown_and_pulled(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT")
    hub.files["/a/m.gguf"] = FILES["m-Q8_0.gguf"]
    url = f"{hub.url}/a/m.gguf"
    assert "on this machine  no\n" in run("show", url).stdout
    assert run("pull", url).exit_code == 0
    assert "on this machine  no\n" not in run("show", url).stdout
    assert f"\n{url}\t\tGGUF" in run("list").stdout


@pytest.mark.parametrize("command", ["pull", "show"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("user/none", "error: user/none is not a folder or GGUF file on this machine, and the hub has no such model"),
        ("user/repo:Q2_K", "has no GGUF file for Q2_K; it has m-Q8_0.gguf"),
        ("ollama:phi", "error: Ollama has no model phi"),
        ("x\x1b[31m", r"error: 'x\x1b[31m' is not a folder"),
    ],
)
def test_errors_are_one_line(command: str, name: str, reason: str) -> None:
    failed = run(command, name)
    assert failed.exit_code == 1
    assert reason in failed.stderr
    assert "\x1b[31m'" not in failed.stderr
    assert failed.stdout == ""


def test_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for command in ("pull", "show"):
        failed = run(command, "user/repo")
        assert failed.exit_code == 1
        assert "HF_HUB_OFFLINE forbids" in failed.stderr
    assert hub.asked == []


def test_too_little_memory_is_told_after_a_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_runner.processes.free_memory", lambda: 1 << 10)
    pulled = run("pull", "user/repo:Q8_0")
    assert pulled.exit_code == 0
    assert "warning: its weights need at least 3.9 KiB of memory, and 1.0 KiB are free on this machine" in pulled.stderr


def test_names_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "home" / ".lmstudio" / "models" / "pub" / "re\x1b[31mpo"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(gguf_bytes())
    assert "\x1b" not in run("list").stdout
    models.print_table(("a",), [("x\x1b[31m\ty",)])
    assert capsys.readouterr().out == "a\nx[31m y\n"


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    run("pull", "user/repo:Q8_0")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("FORCE_COLOR", "1")
    head, row = (re.sub("\x1b\\[[0-9;]*m", "", line) for line in run("list").stdout.splitlines())
    assert "\t" not in row
    assert head.index("format") == row.index("GGUF")


def test_ctrl_c_leaves_what_can_be_resumed(hub: FakeHub, tmp_path: Path) -> None:
    content = gguf_bytes(rows=40_000)
    hub.add("user/repo", {"m-Q8_0.gguf": content})
    hub.stalls["m-Q8_0.gguf"] = [len(content), 1_000_000]
    command = [sys.executable, "-m", "server.cli.main", "pull", "user/repo:Q8_0"]
    process = subprocess.Popen(command, env=dict(os.environ), stderr=subprocess.PIPE, text=True)
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    hub.goes_on.set()
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "error: interrupted; the same command continues"
    (partial,) = (tmp_path / "hf" / "hub" / "models--user--repo" / "blobs").iterdir()
    assert content.startswith(partial.read_bytes())
    assert run("pull", "user/repo:Q8_0").exit_code == 0


def test_a_model_is_removed_with_what_was_made_of_it(hub: FakeHub, tmp_path: Path) -> None:
    folder = Path(run("pull", "user/repo").stdout.strip())
    file = Path(run("pull", "user/repo:Q8_0").stdout.strip())
    converted = tmp_path / "own" / f"any-{repository._listing_hash(file)[:16]}-4"
    converted.mkdir(parents=True)
    (converted / "model.safetensors").write_bytes(bytes(1024))
    asked = CliRunner().invoke(app, ["rm", "user/repo:Q8_0"], input="n\n")
    assert (asked.exit_code, asked.stdout.splitlines()[0]) == (1, "Remove user/repo:Q8_0, 8.4 KiB? [y/N]: n")
    assert file.is_file()
    removed = run("rm", "hf.co/user/repo:Q8_0", "--yes")
    assert removed.stdout == "Removed user/repo:Q8_0, 8.4 KiB.\n"
    assert not converted.exists()
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not file.exists()
    assert run("rm", "user/repo", "--yes").exit_code == 0
    assert [path for path in (tmp_path / "hf").rglob("*") if "repo" in path.name] == []
    again = run("rm", "user/repo", "--yes")
    assert again.stderr.startswith("error: user/repo is not in the hub's cache ")
    assert run("list").stdout.count("\n") == 1


def test_content_that_another_commit_needs_stays(hub: FakeHub) -> None:
    first = Path(run("pull", "user/repo:Q8_0").stdout.strip())
    hub.revisions["main"] = OTHER_COMMIT
    second = Path(run("pull", "user/repo:Q8_0").stdout.strip())
    nothing = run("rm", "user/repo:Q8_0", "--revision", COMMIT, "--yes")
    assert first != second
    assert nothing.stdout == "Removed user/repo:Q8_0, 0 bytes.\n"
    assert not first.exists()
    assert second.read_bytes() == FILES["m-Q8_0.gguf"]


def test_a_url_s_file_is_removed(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT")
    hub.files["/a/m.gguf"] = FILES["m-Q8_0.gguf"]
    url = f"{hub.url}/a/m.gguf"
    assert run("rm", url, "--yes").stderr.startswith(f"error: {url} was not downloaded")
    run("pull", url)
    assert run("rm", url, "--yes").stdout.startswith(f"Removed {url}, 7.")
    assert list((tmp_path / "own" / "downloads").iterdir()) == []


def test_what_belongs_to_others_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"x")
    for name, reason in (
        (str(tmp_path / "mine.gguf"), "was not downloaded by Samewise; remove it as you remove other files"),
        ("ollama:phi", "belongs to Ollama, which has to remove it"),
        ("lmstudio:a/b", "belongs to LM Studio, which has to remove it"),
        ("SmolLM2-135M-Instruct", "is part of the package samewise-smollm2; uninstall the package"),
    ):
        failed = run("rm", name, "--yes")
        assert failed.exit_code == 1
        assert failed.stderr.startswith(f"error: {name} {reason}")
    assert (tmp_path / "mine.gguf").exists()


def test_a_full_disk_keeps_what_has_arrived(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(transfer.os, "fsync", full)
        failed = run("pull", "user/repo:Q8_0")
    blobs = tmp_path / "hf" / "hub" / "models--user--repo" / "blobs"
    assert failed.stderr.splitlines()[-1] == (
        f"error: user/repo:Q8_0 cannot be downloaded: the disk of {blobs} is full; free some room and run it again "
        "to resume, or remove what has arrived with `samewise rm`"
    )
    (partial,) = blobs.iterdir()
    assert partial.name.endswith(".incomplete")
    lock = tmp_path / "hf" / "hub" / ".locks" / "models--user--repo" / f"{partial.stem}.lock"
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "is being downloaded by another process" in run("rm", "user/repo:Q8_0", "--yes").stderr
    assert run("rm", "user/repo:Q8_0", "--yes").stdout == "Removed user/repo:Q8_0, 7.4 KiB.\n"
    assert not blobs.parent.exists()


def test_the_settings_and_a_server_say_what_is_served(hub: FakeHub, tmp_path: Path) -> None:
    run("pull", "user/repo:Q8_0")
    file = tmp_path / "samewise.yaml"
    file.write_text("models: [{name: small, path: 'user/repo:Q8_0', aliases: [tiny]}, {name: user/repo}]")
    listed = run("list", "--config", str(file))
    assert [line.split("\t")[-1] for line in listed.stdout.splitlines()] == ["served as", "small, tiny"]
    assert "warning: user/repo is not on this machine; `samewise pull user/repo` downloads it" in listed.stderr
    assert json.loads(run("list", "--json", "--config", str(file)).stdout)[0]["served_as"] == ["small", "tiny"]
    models = [
        {"id": "small", "status": {"value": "loaded"}, "max_model_len": 4096, "aliases": ["tiny"]},
        {"id": "large", "status": {"value": "unloaded", "failed": True}},
        {"id": "elsewhere"},
    ]
    hub.files["/v1/models"] = json.dumps({"data": models}).encode()
    of_server = run("list", "--base-url", f"{hub.url}/v1").stdout.splitlines()
    assert of_server == [
        "name\tstate\ttokens\taliases",
        "small\tloaded\t4,096\ttiny",
        "large\tfailed\t\t",
        "elsewhere\t\t\t",
    ]
    assert json.loads(run("list", "--json", "--base-url", f"{hub.url}/v1").stdout) == models
    hub.files["/v1/models"] = b'{"data": [{}]}'
    assert "the answer is not an OpenAI list of models" in run("list", "--base-url", f"{hub.url}/v1").stderr
    assert run("list", "--base-url", "x", "--config", str(file)).exit_code == 2
