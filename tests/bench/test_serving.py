"""The benchmark of serving: what it measures against, and what it writes."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import serving
from bench.model_work import ModelWork
from bench.roofline import Roofline
from tests.server.tiny_model import write_folder

ROOT = Path(__file__).parents[2]
MACHINE = Roofline("cpu", "p", 2, 2, "AVX2", "2", 1.0, 1.0, 1.0, 64, None, None)
REPORT = SimpleNamespace(
    output_tokens_per_s=1.0, time_to_first_token_ms=None, inter_token_ms=None, num_requests=1, num_completed=1
)


@pytest.mark.parametrize("how", ["argument", "variable", "file"])
def test_the_limit_is_that_of_the_served_model(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "tiny")
    (tmp_path / "settings.yaml").write_text(f"model: {folder}")
    if how == "variable":
        monkeypatch.setenv("SAMEWISE_MODEL", str(folder))
    named = {"argument": [str(folder)], "variable": [], "file": ["--config", str(tmp_path / "settings.yaml")]}[how]
    measured: list[Path] = []

    async def no_server(*_: object) -> list[object]:
        return [SimpleNamespace(concurrency=1, report=REPORT)]

    def work_of(path: Path) -> ModelWork:
        measured.append(path)
        return ModelWork(100, 10, 55)

    monkeypatch.setattr(serving, "measure", no_server)
    monkeypatch.setattr(serving.roofline, "measure", lambda _: MACHINE)
    monkeypatch.setattr(ModelWork, "of", work_of)
    monkeypatch.setattr("sys.argv", ["bench.serving", "--concurrency", "1", "--speculation", "off", *named])
    serving.main()
    assert measured == [folder]


def test_the_documented_command_replaces_no_page_unasked(tmp_path: Path) -> None:
    script, python = tmp_path / "bench" / "serving.sh", tmp_path / ".venv" / "bin" / "python"
    for path, text in ((script, (ROOT / "bench" / "serving.sh").read_text()), (python, '#!/bin/sh\necho "$@"\n')):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    said = subprocess.run([script, "--docs", "page"], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["-m", "bench.serving", "--concurrency", "1", "8", "32", "64", "--docs", "page"]
