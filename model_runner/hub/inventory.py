"""All models on this machine that the server can read, and the removal of those that were downloaded.

Files of other programs are only listed.
"""

import contextlib
import fcntl
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model_runner.gguf.header import parts_of
from model_runner.hub.access import MAIN, ModelNotFoundError, hub_cache
from model_runner.hub.cached import FOLDER, SOURCE, find_cached, folder_of
from model_runner.hub.choice import WEIGHTS, Wanted, choose_gguf
from model_runner.hub.names import FileUrl, HubName, StoreName, is_embedded, parse_name
from model_runner.hub.other_stores import models_of_llama_cpp, models_of_lmstudio, models_of_ollama
from model_runner.hub.store import RepoCache, files_below, repos_in
from model_runner.json_files import read_object

_TAG = re.compile(r"[-.]([A-Za-z0-9_]+)(-\d{5}-of-\d{5})?\.gguf", re.IGNORECASE)
_PROGRAMS = {"ollama": "Ollama", "lmstudio": "LM Studio"}


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


@dataclass(frozen=True, slots=True)
class Download:
    """A model that was downloaded, or the part of one that has arrived."""

    name: str
    paths: tuple[Path, ...]
    """GGUF files and folders that were served. Empty if only a part is there."""
    size: int
    """Bytes that its removal frees."""
    links: tuple[Path, ...]
    """Files to remove: those in snapshots of the hub's cache, or the folder of a URL's file."""
    blobs: tuple[Path, ...] = ()
    """Content that nothing else in the hub's cache needs, parts of downloads included."""
    repo: RepoCache | None = None

    def remove(self) -> None:
        """Remove the files, and folders of the repository that have no weights any more. Raises OSError."""
        for path in (*self.links, *self.blobs):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if self.repo is None:
            return
        for commit in self.repo.snapshots():
            if not any(path.endswith(WEIGHTS) for path in self.repo.files_of(commit)):
                shutil.rmtree(self.repo.snapshot(commit))
        if not self.repo.snapshots() and not self.repo.partials():
            for folder in (self.repo.folder, self.repo.locks):
                shutil.rmtree(folder, ignore_errors=True)


def find_download(name: str, own_cache: Path, revision: str | None = None) -> Download:
    """The download with this name: at one revision of the hub, otherwise at all that are there.

    Raises:
        ModelNotFoundError: if there is none, it is being downloaded, or it belongs to somebody else.
    """
    if is_embedded(name):
        raise ModelNotFoundError(f"{name} is part of the package samewise-smollm2; uninstall the package to remove it")
    if Path(name).expanduser().exists():
        raise ModelNotFoundError(f"{name} was not downloaded by Samewise; remove it as you remove other files")
    parsed = parse_name(name)
    if isinstance(parsed, StoreName):
        program = _PROGRAMS[parsed.store]
        raise ModelNotFoundError(f"{name} belongs to {program}, which has to remove it")
    if isinstance(parsed, FileUrl):
        return _find_file(parsed, own_cache)
    return _find_in_hub(parsed, revision or parsed.revision)


def _find_file(name: FileUrl, own_cache: Path) -> Download:
    folder = folder_of(name, own_cache)
    if not folder.is_dir():
        raise ModelNotFoundError(f"{name.address} was not downloaded; `samewise list` shows what was")
    _check_not_running(name.address, sorted(folder.glob("*.lock")))
    size = sum(file.lstat().st_size for file in files_below(folder))
    return Download(name.address, tuple(sorted(folder.glob("*.gguf"))), size, (folder,))


def _find_in_hub(name: HubName, revision: str | None) -> Download:
    repo = RepoCache(hub_cache(), name.repo)
    wanted = Wanted(name.tag, name.file)
    commits = repo.snapshots() if revision is None else [repo.commit_of(revision) or revision]
    found = [one.path for commit in commits if (one := find_cached(repo, commit, wanted, anyhow=True)) is not None]
    links = {link for path in found for link in _links_of(path)}
    others = {link for commit in repo.snapshots() for link in files_below(repo.snapshot(commit))} - links
    needed = {link.resolve() for link in others}
    blobs = {link.resolve() for link in links if repo.holds(link)} - needed
    if not any(link.name.endswith(WEIGHTS) for link in others):
        blobs |= set(repo.partials())
        _check_not_running(str(name), sorted(repo.locks.glob("*.lock")))
    if not links and not blobs:
        raise ModelNotFoundError(f"{name} is not in the hub's cache {hub_cache()}; `samewise list` shows what is there")
    size = sum(blob.stat().st_size for blob in blobs)
    return Download(str(name), tuple(found), size, tuple(links), tuple(blobs), repo)


def _links_of(path: Path) -> Iterator[Path]:
    """Files of a snapshot that make a model: the parts of a GGUF file, or all others than GGUF files."""
    if path.is_file():
        yield from parts_of(path)
    else:
        yield from (file for file in files_below(path) if not file.name.lower().endswith(".gguf"))


def _check_not_running(name: str, locks: list[Path]) -> None:
    """Raises ModelNotFoundError if a process downloads one of the files."""
    for lock in locks:
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"{name} is being downloaded by another process; try again when that has ended"
                raise ModelNotFoundError(message) from None
            except OSError:  # a file system without locks
                return
