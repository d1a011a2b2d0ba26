"""Files of other programs and of the hub, as far as the weights."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from model_runner.gguf.checkpoint import GgufCheckpoint
from model_runner.hub.repository import resolve_model
from model_runner.spec.model_folder import open_checkpoint
from tests.conftest import tiny_config
from tests.model_runner.gguf_files import contents_of

DIGEST = "ab" * 32


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return contents_of(tiny_config("llama")).write(tmp_path / "m-F32.gguf")


def test_a_blob_of_ollama(gguf_file: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name has no ending."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    manifest = tmp_path / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    manifest.parent.mkdir(parents=True)
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}"}]
    manifest.write_text(json.dumps({"layers": layers}))
    blob = tmp_path / "ollama" / "blobs" / f"sha256-{DIGEST}"
    blob.parent.mkdir()
    gguf_file.rename(blob)
    found = resolve_model("ollama:tiny", console)
    assert found.name == "tiny"
    assert found.path.name.startswith("tiny-")
    checkpoint = open_checkpoint(found.path)
    assert isinstance(checkpoint, GgufCheckpoint)
    assert "model.embed_tokens.weight" in checkpoint.shapes


def test_safetensors_are_read_also_next_to_a_gguf_file(
    gguf_file: Path, tiny_model: Callable[[str], Path], tmp_path: Path, console: Console
) -> None:
    """A snapshot of the hub has both if both were served."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in (gguf_file, *tiny_model("llama").iterdir()):
        (folder / path.name).symlink_to(path)
    found = resolve_model(str(folder), console)
    assert found.path == folder
    checkpoint = open_checkpoint(found.path)
    assert checkpoint is not None
    assert not isinstance(checkpoint, GgufCheckpoint)
    (folder / "model.safetensors").unlink()
    assert isinstance(open_checkpoint(folder), GgufCheckpoint)
