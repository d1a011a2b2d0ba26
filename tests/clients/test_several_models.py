"""Clients of Ollama's API on a server with two models, of which one is loaded on demand."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import httpx
import pytest

from tests.served.conftest import Server

pytestmark = pytest.mark.embedded

NAMES = ("first", "second")
LIMIT_S = 300


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Server]:
    """The same model under two names, so that both have the same answers."""
    settings = tmp_path / "settings.yaml"
    entries = [{"name": name, "path": "SmolLM2-135M-Instruct"} for name in NAMES]
    settings.write_text(json.dumps({"models": entries}))
    running = Server("--config", str(settings), "--kv-cache-gib", "0.1")
    yield running
    assert running.terminate() == 0


def test_langchain(several: Server) -> None:
    chat = pytest.importorskip("langchain_ollama").ChatOllama
    models = [chat(base_url=several.address, model=name, validate_model_on_init=True, num_predict=12, seed=3,
                   temperature=0.7) for name in NAMES]  # fmt: skip
    whole = [model.invoke("What is rain?").content for model in models]
    streamed = ["".join(piece.content for piece in model.stream("What is rain?")) for model in models]
    assert len({*whole, *streamed}) == 1
    assert whole[0]
    statuses = [one["status"]["value"] for one in httpx.get(f"{several.address}/v1/models").json()["data"]]
    assert statuses == ["loaded", "loaded"]


def test_ollamas_own_client(several: Server, node_modules: Path, node_env: dict[str, str], tmp_path: Path) -> None:
    copytree(Path(__file__).parent / "node", tmp_path, dirs_exist_ok=True)
    (tmp_path / "node_modules").symlink_to(node_modules)
    ended = subprocess.run(
        ["node", "ollama_models.mjs", several.address, *NAMES],
        cwd=tmp_path, env=node_env, timeout=LIMIT_S, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
