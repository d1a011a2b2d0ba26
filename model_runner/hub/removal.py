"""Removes downloaded models: of the hub, from its cache, and of URLs. Files of others are never touched."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model_runner.gguf.header import parts_of
from model_runner.hub.access import ModelNotFoundError, hub_cache
from model_runner.hub.cached import find_cached
from model_runner.hub.choice import WEIGHTS, Wanted
from model_runner.hub.names import FileUrl, HubName, StoreName, is_embedded, parse_name
from model_runner.hub.store import RepoCache
from model_runner.hub.url_cache import folder_of

_PROGRAMS = {"ollama": "Ollama", "lmstudio": "LM Studio"}


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
    return Download(name.address, tuple(sorted(folder.glob("*.gguf"))), _bytes_below(folder), (folder,))


def _find_in_hub(name: HubName, revision: str | None) -> Download:
    repo = RepoCache(hub_cache(), name.repo)
    wanted = Wanted(name.tag, name.file)
    commits = repo.snapshots() if revision is None else [repo.commit_of(revision) or revision]
    found = [one.path for commit in commits if (one := find_cached(repo, commit, wanted, anyhow=True)) is not None]
    links = {link for path in found for link in _links_of(path)}
    others = {link for commit in repo.snapshots() for link in _files_below(repo.snapshot(commit))} - links
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
        yield from (file for file in _files_below(path) if not file.name.lower().endswith(".gguf"))


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


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)


def _bytes_below(folder: Path) -> int:
    return sum(file.lstat().st_size for file in _files_below(folder))
