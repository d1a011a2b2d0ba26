"""All models on this machine that the server can read, its own downloads and other programs'."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model_runner.gguf.header import parts_of
from model_runner.hub.access import MAIN, ModelNotFoundError, hub_cache
from model_runner.hub.cached import find_cached
from model_runner.hub.choice import Wanted, choose_gguf
from model_runner.hub.other_stores import models_of_llama_cpp, models_of_lmstudio, models_of_ollama
from model_runner.hub.store import RepoCache, repos_in
from model_runner.hub.url_cache import FOLDER, SOURCE
from model_runner.json_files import read_object

_TAG = re.compile(r"[-.]([A-Za-z0-9_]+)(-\d{5}-of-\d{5})?\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine."""

    name: str
    """The name that `samewise serve` takes."""
    format: str
    """`safetensors` or `GGUF`."""
    size: int
    source: str
    path: Path
    used: float
    """When its files were last written, in seconds since 1970."""
    revision: str | None = None
    """Branch, tag or commit, if it is not the main branch."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def list_models(own_cache: Path) -> list[LocalModel]:
    """Models in the hub's cache, in Samewise's, and of Ollama, LM Studio and llama.cpp."""
    found = [*_models_of_hub(hub_cache()), *_models_of_urls(own_cache)]
    for source, models in (
        ("Ollama", models_of_ollama()),
        ("LM Studio", models_of_lmstudio()),
        ("llama.cpp", models_of_llama_cpp()),
    ):
        for model in models:
            with contextlib.suppress(OSError):
                found.append(_local(model.name, model.path, model.files, source))
    return found


def _models_of_hub(cache: Path) -> Iterator[LocalModel]:
    for repo, files in repos_in(cache):
        main = files.commit_of(MAIN)
        for commit in files.snapshots():
            revision = None if commit == main else _revision_of(files, commit)
            with contextlib.suppress(OSError):
                yield from _models_at(repo, files, commit, revision)


def _models_at(repo: str, files: RepoCache, commit: str, revision: str | None) -> Iterator[LocalModel]:
    """The models of a commit that are complete."""
    snapshot, present = files.snapshot(commit), files.files_of(commit)
    for first in sorted(path for path in present if path.lower().endswith(".gguf")):
        try:
            parts = choose_gguf(present, Wanted(file=first), repo)
        except ModelNotFoundError:
            continue
        if parts[0] == first and "mmproj" not in first.lower():
            paths = [snapshot / part for part in parts]
            yield _local(_name_of(repo, first, present), paths[0], paths, "hub", revision)
    found = find_cached(files, commit, Wanted(), anyhow=True)
    if found is not None and found.path.is_dir() and any(path.endswith(".safetensors") for path in present):
        files_of_it = [found.path / path for path in present if not path.lower().endswith(".gguf")]
        yield _local(repo, found.path, files_of_it, "hub", revision)


def _name_of(repo: str, file: str, present: Iterable[str]) -> str:
    """The shortest name that means this file."""
    tag = _TAG.search(file)
    if tag is not None:
        with contextlib.suppress(ModelNotFoundError):
            if choose_gguf(list(present), Wanted(tag[1]), repo)[0] == file:
                return f"{repo}:{tag[1]}"
    return f"{repo}/{file}"


def _revision_of(files: RepoCache, commit: str) -> str:
    refs = files.folder / "refs"
    for path in sorted(refs.rglob("*")):
        name = path.relative_to(refs).as_posix()
        if path.is_file() and name.isprintable() and files.commit_of(name) == commit:
            return name
    return commit


def _models_of_urls(own_cache: Path) -> Iterator[LocalModel]:
    for source in sorted((own_cache / FOLDER).glob(f"*/{SOURCE}")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            url = str(read_object(source)["url"])
            first = next(path for path in sorted(source.parent.glob("*.gguf")) if parts_of(path)[0] == path)
            parts = parts_of(first)
            if all(part.is_file() for part in parts):
                yield _local(url, first, parts, "URL")


def _local(name: str, path: Path, files: Iterable[Path], source: str, revision: str | None = None) -> LocalModel:
    stats = [file.stat() for file in files]
    size, used = sum(one.st_size for one in stats), max(one.st_mtime for one in stats)
    return LocalModel(name, "safetensors" if path.is_dir() else "GGUF", size, source, path, used, revision)
