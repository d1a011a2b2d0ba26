"""Models that Ollama, LM Studio and llama.cpp have downloaded. Read only: nothing is ever written there.

Ollama: `manifests/<registry>/<namespace>/<model>/<tag>` is a JSON list of layers; the layer of the model's type names
`blobs/sha256-<hash>`, a GGUF file. LM Studio: `models/<publisher>/<repository>/<file>.gguf`.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from model_runner.gguf.header import parts_of
from model_runner.hub.access import ModelNotFoundError
from model_runner.hub.choice import Wanted, choose_gguf, chooses_gguf
from model_runner.hub.names import StoreName
from model_runner.hub.store import files_below, is_inside
from model_runner.json_files import is_safe_path, read_object

_MODEL = "application/vnd.ollama.image.model"
_ADAPTER = "application/vnd.ollama.image.adapter"
_REGISTRY, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_WORD = re.compile(r"\w[\w.:-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of another program."""

    name: str
    """The name that `samewise serve` takes."""
    path: Path
    """GGUF file (the first of its parts), or folder."""
    files: tuple[Path, ...]


def find_stored(name: StoreName) -> Path:
    """The GGUF file or folder of a model that another program has downloaded.

    Raises:
        ModelNotFoundError: if there is none of this name.
    """
    return _find_in_ollama(name.name) if name.store == "ollama" else _find_in_lmstudio(name.name)


def ollama_folders() -> list[Path]:
    """Where Ollama keeps models: OLLAMA_MODELS, the user's folder, or the service's."""
    if named := os.environ.get("OLLAMA_MODELS"):
        return [Path(named).expanduser()]
    return [Path("~/.ollama/models").expanduser(), Path("/usr/share/ollama/.ollama/models")]


def lmstudio_folders() -> list[Path]:
    """Where LM Studio keeps models, new and old."""
    return [Path(folder).expanduser() for folder in ("~/.lmstudio/models", "~/.cache/lm-studio/models")]


def llama_cpp_folder() -> Path:
    """Where llama.cpp kept models before it used the hub's cache."""
    return Path(os.environ.get("LLAMA_CACHE") or "~/.cache/llama.cpp").expanduser()


def models_of_ollama() -> Iterator[StoredModel]:
    """Models of Ollama whose files are there."""
    for folder in ollama_folders():
        manifests = folder / "manifests"
        for path in _safe_files(manifests):
            parts = path.relative_to(manifests).parts
            if len(parts) != 4 or not all(map(_WORD.fullmatch, parts)):
                continue
            try:
                blob = _read_manifest(folder, path)
            except ModelNotFoundError:
                continue
            yield StoredModel(f"ollama:{_shortened(*parts)}", blob, (blob,))


def models_of_lmstudio() -> Iterator[StoredModel]:
    """GGUF files of LM Studio, and its folders of safetensors."""
    for root in lmstudio_folders():
        for folder in sorted({path.parent for path in _safe_files(root)}):
            parts = folder.relative_to(root).parts
            if len(parts) >= 2:
                yield from _models_in(root, folder, f"lmstudio:{'/'.join(parts)}")


def models_of_llama_cpp() -> Iterator[StoredModel]:
    """GGUF files of llama.cpp's old cache, named by their paths."""
    root = llama_cpp_folder()
    for files in _gguf_models(_safe_files(root)):
        yield StoredModel(str(files[0]), files[0], files)


def _models_in(root: Path, folder: Path, name: str) -> Iterator[StoredModel]:
    files = [path for path in _safe_files(root) if path.parent == folder]
    names = [path.name for path in files]
    if "config.json" in names and not chooses_gguf(names, Wanted()):
        yield StoredModel(name, folder, tuple(files))
    for parts in _gguf_models(files):
        yield StoredModel(f"{name}/{parts[0].name}", parts[0], parts)


def _gguf_models(files: Iterable[Path]) -> Iterator[tuple[Path, ...]]:
    """The parts of each GGUF model that is complete."""
    for path in files:
        if path.suffix.lower() != ".gguf" or "mmproj" in path.name.lower():
            continue
        parts = parts_of(path)
        if parts[0] == path and all(part.is_file() for part in parts):
            yield tuple(parts)


def _find_in_ollama(name: str) -> Path:
    path, _, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", _TAG)
    words = path.split("/")
    parts = [*(_REGISTRY, _NAMESPACE)[: max(3 - len(words), 0)], *words, tag]
    if len(parts) != 4 or not all(map(_WORD.fullmatch, parts)):
        raise ModelNotFoundError(f"ollama:{name!r} is not a name of Ollama's, such as ollama:llama3.2:3b")
    for folder in ollama_folders():
        manifest = folder.joinpath("manifests", *parts)
        if manifest.is_file():
            return _read_manifest(folder, manifest)
    raise ModelNotFoundError(
        f"Ollama has no model {name} in {' or '.join(map(str, ollama_folders()))}; `samewise list` shows those that it "
        f"has, and `ollama pull {name}` downloads it"
    )


def _read_manifest(folder: Path, path: Path) -> Path:
    """The GGUF file that a manifest names. Raises ModelNotFoundError if there is none."""
    try:
        if not is_inside(path, folder):
            raise ValueError("it is no manifest")
        manifest = read_object(path)
        layers = {str(layer["mediaType"]): str(layer["digest"]) for layer in manifest["layers"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelNotFoundError(f"{path} cannot be read ({error}); pull the model again with Ollama") from error
    if _ADAPTER in layers:
        raise ModelNotFoundError(f"{path} has an adapter, which this server cannot apply")
    digest = _DIGEST.fullmatch(layers.get(_MODEL, ""))
    if digest is None:
        raise ModelNotFoundError(f"{path} names no GGUF file; only models of this kind can be read")
    blob = folder / "blobs" / f"sha256-{digest[1]}"
    if not blob.is_file() or not is_inside(blob, folder):
        raise ModelNotFoundError(f"{blob} is missing; pull the model again with Ollama")
    return blob


def _shortened(registry: str, namespace: str, model: str, tag: str) -> str:
    """A name as Ollama shows it."""
    if registry != _REGISTRY:
        return f"{registry}/{namespace}/{model}:{tag}"
    return f"{model}:{tag}" if namespace == _NAMESPACE else f"{namespace}/{model}:{tag}"


def _find_in_lmstudio(name: str) -> Path:
    path, _, tag = name.partition(":")
    if not is_safe_path(path) or "/" not in path:
        raise ModelNotFoundError(f"lmstudio:{name!r} is not a name such as lmstudio:publisher/repository")
    for root in lmstudio_folders():
        target = root / path
        if not target.exists() or not is_inside(target, root):
            continue
        if target.is_file() and not tag:
            return target
        files = [file.relative_to(target).as_posix() for file in _safe_files(target) if is_inside(file, root)]
        wanted = Wanted(tag or None)
        return target / choose_gguf(files, wanted, name)[0] if chooses_gguf(files, wanted) else target
    raise ModelNotFoundError(
        f"LM Studio has no model {name} in {' or '.join(map(str, lmstudio_folders()))}; `samewise list` shows those "
        "that it has"
    )


def _safe_files(folder: Path) -> list[Path]:
    """Files in a folder and below, whose names can be printed, and that are inside of it when links are followed."""
    found = (path for path in files_below(folder) if path.name.isprintable())
    return sorted(path for path in found if path.is_file() and is_inside(path, folder))
