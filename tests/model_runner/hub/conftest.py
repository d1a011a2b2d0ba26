import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from model_runner.hub import transfer
from tests.model_runner.hub.fake_hub import FakeHub, running


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache folder; everything else is below `tmp_path`, too."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(transfer, "_FIRST_WAIT_S", 0.0)
    return tmp_path / "hf" / "hub"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made
