"""Models of Ollama, LM Studio and llama.cpp, and the list of all models on a machine."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from model_runner.hub.access import HubAccess, ModelNotFoundError
from model_runner.hub.inventory import list_models
from model_runner.hub.names import StoreName
from model_runner.hub.other_stores import find_stored
from model_runner.hub.repository import locate_model
from model_runner.hub.store import RepoCache
from tests.model_runner.hub.fake_hub import COMMIT, OTHER_COMMIT
from tests.model_runner.hub.weights import gguf_bytes, safetensors_bytes

DIGEST = "ab" * 32
MODEL, ADAPTER = (f"application/vnd.ollama.image.{kind}" for kind in ("model", "adapter"))


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / f"sha256-{DIGEST}").write_bytes(gguf_bytes())
    return folder


@pytest.fixture
def lmstudio(tmp_path: Path) -> Path:
    folder = tmp_path / "home" / ".lmstudio" / "models"
    (folder / "pub" / "repo").mkdir(parents=True)
    for tag in ("Q4_K_M", "Q8_0"):
        (folder / "pub" / "repo" / f"m-{tag}.gguf").write_bytes(gguf_bytes())
    (folder / "pub" / "repo" / "mmproj-m.gguf").write_bytes(b"x")
    return folder


def add(folder: Path, name: str = "registry.ollama.ai/library/llama3.2/3b", **layers: str) -> Path:
    path = folder / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = layers or {"model": f"sha256:{DIGEST}"}
    entries = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": value} for kind, value in kinds.items()]
    path.write_text(json.dumps({"schemaVersion": 2, "layers": entries}))
    return path


@pytest.mark.parametrize(
    ("manifest", "name"),
    [
        ("registry.ollama.ai/library/llama3.2/3b", "llama3.2:3b"),
        ("registry.ollama.ai/library/llama3.2/latest", "llama3.2"),
        ("registry.ollama.ai/me/mine/v1", "me/mine:v1"),
        ("hf.co/user/repo/Q4_K_M", "hf.co/user/repo:Q4_K_M"),
        ("localhost:5000/library/x/y", "localhost:5000/library/x:y"),
    ],
)
def test_names_of_ollama(manifest: str, name: str, ollama: Path, console: Console, tmp_path: Path) -> None:
    add(ollama, manifest)
    assert find_stored(StoreName("ollama", name)) == ollama / "blobs" / f"sha256-{DIGEST}"
    (listed,) = list_models(tmp_path)
    shown = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    assert (listed.name, listed.source, listed.format) == (f"ollama:{shown}", "Ollama", "GGUF")
    assert locate_model(listed.name, console) == (ollama / "blobs" / f"sha256-{DIGEST}", shown)
    assert listed.size == len(gguf_bytes())


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ({"model": "sha256:../../../../etc/passwd"}, "names no GGUF file"),
        ({"model": f"sha256:{'cd' * 32}"}, "is missing; pull the model again"),
        ({"template": f"sha256:{DIGEST}"}, "names no GGUF file"),
        ({"model": f"sha256:{DIGEST}", "adapter": f"sha256:{DIGEST}"}, "has an adapter"),
    ],
)
def test_what_ollama_has_and_cannot_be_read(layers: dict[str, str], reason: str, ollama: Path, tmp_path: Path) -> None:
    add(ollama, **layers)
    with pytest.raises(ModelNotFoundError, match=reason):
        find_stored(StoreName("ollama", "llama3.2:3b"))
    assert list_models(tmp_path) == []


@pytest.mark.parametrize("content", ["{", "[]", '{"layers": 1}', '{"layers": [{}]}', "null"])
def test_damaged_manifests(content: str, ollama: Path, tmp_path: Path) -> None:
    add(ollama).write_text(content)
    with pytest.raises(ModelNotFoundError, match=r"cannot be read .* pull the model again"):
        find_stored(StoreName("ollama", "llama3.2:3b"))
    assert list_models(tmp_path) == []


def test_links_out_of_a_store_are_not_followed(ollama: Path, lmstudio: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.gguf").write_bytes(gguf_bytes())
    add(ollama)
    blob = ollama / "blobs" / f"sha256-{DIGEST}"
    blob.unlink()
    blob.symlink_to(tmp_path / "secret.gguf")
    for path in (lmstudio / "pub" / "repo").iterdir():
        path.unlink()
    (lmstudio / "pub" / "repo" / "link.gguf").symlink_to(tmp_path / "secret.gguf")
    for name in (StoreName("ollama", "llama3.2:3b"), StoreName("lmstudio", "pub/repo/link.gguf")):
        with pytest.raises(ModelNotFoundError):
            find_stored(name)
    assert list_models(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    ["", "..", "../x", "/etc/passwd", "a/b/c/d:e", "a:b/../c", "x\x1b[31m:y", "a//b"],
)
@pytest.mark.parametrize("store", ["ollama", "lmstudio"])
def test_hostile_names(store: str, name: str, ollama: Path, lmstudio: Path) -> None:
    with pytest.raises(ModelNotFoundError) as failure:
        find_stored(StoreName(store, name))
    assert str(failure.value).isprintable()


def test_a_model_that_ollama_has_not(ollama: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"Ollama has no model phi in .*; `samewise list` shows those"):
        find_stored(StoreName("ollama", "phi"))


def test_lm_studio(lmstudio: Path, console: Console, tmp_path: Path) -> None:
    folder = lmstudio / "pub" / "repo"
    assert find_stored(StoreName("lmstudio", "pub/repo")) == folder / "m-Q4_K_M.gguf"
    assert find_stored(StoreName("lmstudio", "pub/repo:q8_0")) == folder / "m-Q8_0.gguf"
    assert [model.name for model in list_models(tmp_path)] == [
        "lmstudio:pub/repo/m-Q4_K_M.gguf",
        "lmstudio:pub/repo/m-Q8_0.gguf",
    ]
    for model in list_models(tmp_path):
        assert locate_model(model.name, console)[0] == model.path
    with pytest.raises(ModelNotFoundError, match=r"LM Studio has no model pub/other"):
        find_stored(StoreName("lmstudio", "pub/other"))


def test_a_revision_is_for_the_hub(ollama: Path, console: Console) -> None:
    add(ollama)
    with pytest.raises(
        ModelNotFoundError, match=r"revision v1 applies to models of the hub, not to ollama:llama3.2:3b"
    ):
        locate_model("ollama:llama3.2:3b", console, HubAccess(revision="v1"))


def test_the_list_of_the_hubs_cache(cache: Path, console: Console, tmp_path: Path) -> None:
    repo = RepoCache(cache, "user/repo")
    repo.remember("main", COMMIT)
    repo.remember("v1", OTHER_COMMIT)
    files = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors_bytes(),
        "m-Q8_0.gguf": gguf_bytes(),
        "x/m-F16-00001-of-00002.gguf": gguf_bytes(),
        "x/m-F16-00002-of-00002.gguf": gguf_bytes(),
        "y-00001-of-00002.gguf": b"a part is missing",
    }
    for commit in (COMMIT, OTHER_COMMIT):
        for name, content in files.items():
            path = repo.snapshot(commit) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    (repo.snapshot(OTHER_COMMIT) / "model.safetensors").unlink()
    listed = {(model.name, model.revision): model for model in list_models(tmp_path)}
    names = ["user/repo:Q8_0", "user/repo:F16"]
    assert sorted(listed, key=str) == sorted(
        [*((name, revision) for name in names for revision in (None, "v1")), ("user/repo", None)], key=str
    )
    assert listed["user/repo", None].size == len(safetensors_bytes()) + 4
    assert listed["user/repo:F16", None].size == 2 * len(gguf_bytes())
    for (name, revision), model in listed.items():
        assert locate_model(name, console, HubAccess(revision=revision))[0] == model.path


def test_llama_cpps_old_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "user_repo_m.gguf").write_bytes(gguf_bytes())
    (model,) = list_models(tmp_path)
    assert (model.source, model.name) == ("llama.cpp", str(tmp_path / "llama" / "user_repo_m.gguf"))
    assert locate_model(model.name, console)[0] == model.path
