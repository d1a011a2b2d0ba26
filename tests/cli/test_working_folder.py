"""The folder in which the server is started is data: nothing in it is imported, run or read as a setting."""

import operator
import subprocess
import sys
from contextlib import closing
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from model_runner.hub.access import ModelNotFoundError
from model_runner.hub.repository import resolve_model
from model_runner.kernels.build import build_suffix
from model_runner.learning.link import COMMAND
from model_runner.processes import start_connected
from server.api.body_worker import LARGE_BYTES, BodyWorker, WorkerPool
from server.config import Settings
from server.engine.process import ProcessLink
from server.telemetry.request_trace import Sender
from server.text.tokenizer import Tokenizer
from tests import tiny_vocabulary

ROOT = Path(__file__).parents[2]
OWN = ("server", "scheduler", "model_runner", "sitecustomize", "usercustomize")
HEADERS = ("own.h", "cstdint", "stdint.h")
PROGRAMS = ("c++", "g++", "as", "ld", "collect2")


class Planted:
    """A working folder that does harm, if anything in it is used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = folder.parent / "mark"
        code = f"open({str(self._mark)!r}, 'a').write(__name__ + ' ')\nraise ImportError(__name__)\n"
        for name in {*sys.stdlib_module_names, *packages_distributions(), *OWN}:
            if name.isidentifier():
                (folder / f"{name}.py").write_text(code)
        for name in HEADERS:
            (folder / name).write_text("#error planted\n")
        for name in PROGRAMS:
            (folder / name).write_text(f"#!/bin/sh\necho {name} >> {self._mark}\n")
            (folder / name).chmod(0o755)
        for name in (".env", "samewise.env", "samewise.yaml", "config.yaml"):
            (folder / name).write_text("SAMEWISE_PORT=none\nport: none\n")
        (folder / "model.gguf").write_bytes(b"no model")

    @property
    def was_used(self) -> str:
        """The part that was used; empty for none."""
        return self._mark.read_text() if self._mark.exists() else ""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    (tmp_path / "folder").mkdir()
    made = Planted(tmp_path / "folder")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(made.folder)
    return made


def test_it_does_harm_where_children_are_not_isolated(planted: Planted) -> None:
    assert subprocess.run([sys.executable, "-c", "import msgspec"], capture_output=True, check=False).returncode
    assert "msgspec" in planted.was_used


def test_the_command_and_the_conversion_of_a_model(planted: Planted) -> None:
    """As `samewise serve` in a folder with a model from elsewhere."""
    command = [Path(sys.executable).with_name("samewise"), "serve", "--host", "127.0.0.1", "--port", "0", "model.gguf"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not planted.was_used
    reason = f"{planted.folder / 'model.gguf'} cannot be converted: model.gguf is not a GGUF file; download it again"
    assert result.stderr.splitlines()[-1] == f"error: {reason}"


def test_the_conversion_that_another_program_begins(planted: Planted) -> None:
    with pytest.raises(ModelNotFoundError, match="is not a GGUF file"):
        resolve_model("model.gguf", Console(quiet=True))
    assert not planted.was_used


async def test_the_engine(planted: Planted) -> None:
    link = await ProcessLink.open()
    await link.close(grace_s=60)
    assert "exited with code 0" in await link.exited()
    assert not planted.was_used


def test_the_learner(planted: Planted) -> None:
    process, connection = start_connected(COMMAND)
    connection.close()
    assert process.wait() == 0
    assert not planted.was_used


async def test_the_intake_of_large_bodies(planted: Planted, tmp_path: Path) -> None:
    tiny_vocabulary.tokenizer(320).save(str(tmp_path / "tokenizer.json"))
    nothing: Any = None
    model: Any = SimpleNamespace(images=None)
    with closing(WorkerPool()) as workers:
        worker = BodyWorker(Tokenizer.from_folder(tmp_path), tmp_path, model, Settings(), workers)
        assert await worker.run(operator.is_not, bytes(LARGE_BYTES), nothing, sender=Sender(""))  # costs no import
        worker.close()
    assert not planted.was_used


def test_the_compiler_of_the_kernels(planted: Planted, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "own.h").write_text("#include <cstdint>\n")
    (sources / "suffix.cpp").write_text('#include "own.h"\nstd::int32_t one = 1;\n')
    assert build_suffix(tmp_path / "library", sources=sources).exists()
    assert not planted.was_used
