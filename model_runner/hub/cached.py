"""Finds models that were downloaded, without the network: in the hub's cache, and files of URLs in Samewise's own."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from model_runner.gguf.header import parts_of
from model_runner.hub.access import MAIN, ModelNotFoundError
from model_runner.hub.choice import PREFERRED, Wanted, choose_gguf, choose_small, choose_weights, chooses_gguf
from model_runner.hub.names import FileUrl
from model_runner.hub.store import RepoCache
from model_runner.weights.safetensors_head import INDEX, SINGLE

FOLDER = "downloads"
"""Where files of URLs are, below Samewise's cache folder."""
SOURCE = "source.json"
"""File with the address and the version, in the folder of each download."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True, slots=True)
class Found:
    """A model on disk."""

    path: Path
    """The folder of a snapshot, or a GGUF file (the first of its parts)."""
    commit: str | None = None
    """The commit of the hub that it is from."""
    digests: dict[Path, str] = field(default_factory=dict)
    """SHA-256 of the files that were downloaded for it just now."""


def find_cached(repo: RepoCache, revision: str, wanted: Wanted, *, anyhow: bool = False) -> Found | None:
    """The model at a revision if all of its files are there.

    Args:
        repo: the cached files of its repository.
        revision: branch, tag or commit.
        wanted: which model.
        anyhow: the hub cannot be asked: take files that are complete as far as can be seen, and for the main branch
            any commit.
    """
    commit = repo.commit_of(revision)
    commits = [] if commit is None else [commit]
    if anyhow and revision == MAIN:
        commits += [one for one in repo.snapshots() if one != commit]
    for one in commits:
        try:
            found = _find_at(repo, one, wanted, anyhow=anyhow)
        except ModelNotFoundError:
            continue  # there may be more on the hub
        if found is not None:
            return Found(found, one)
    return None


def needed_files(repo: RepoCache, commit: str, paths: Collection[str], wanted: Wanted, where: str) -> list[str] | None:
    """The files that the model consists of; None if its index must be downloaded first to know them.

    Raises:
        ModelNotFoundError: if the repository has no such model.
    """
    if chooses_gguf(paths, wanted):
        return choose_gguf(paths, wanted, where)
    small = choose_small(paths, wanted)
    if wanted.is_heads:
        return small
    index = None
    if INDEX in paths and SINGLE not in paths:
        index = repo.snapshot(commit) / INDEX
        if not repo.holds(index):
            return None
    weights = choose_weights(paths, index, where)
    return [*small, *weights]


def model_path(repo: RepoCache, commit: str, files: Collection[str]) -> Path:
    """The path to serve: the GGUF file if these are its parts, otherwise the snapshot's folder."""
    first = next(iter(files))
    return repo.snapshot(commit) / (first if first.lower().endswith(".gguf") else "")


def find_url(name: FileUrl, cache: Path) -> Path | None:
    """The file of a URL, or the first of its parts, if it was downloaded into the cache before."""
    targets = targets_of(name, cache)
    return targets[0] if targets[0].with_name(SOURCE).is_file() and all(map(Path.is_file, targets)) else None


def targets_of(name: FileUrl, cache: Path) -> list[Path]:
    """Where the parts of a URL's file are kept."""
    return [folder_of(name, cache) / part.name for part in parts_of(Path(name.file))]


def folder_of(name: FileUrl, cache: Path) -> Path:
    """The folder of the cache for a URL's file and its other parts."""
    first = f"{name.address.rpartition('/')[0]}/{quote(parts_of(Path(name.file))[0].name)}"
    return cache / FOLDER / hashlib.sha256(first.encode()).hexdigest()[:16]


def urls_of_parts(name: FileUrl) -> list[str]:
    """Addresses of all parts of a URL's file."""
    url = urlsplit(name.url)
    folder = url.path.rpartition("/")[0]
    return [url._replace(path=f"{folder}/{quote(part.name)}").geturl() for part in parts_of(Path(name.file))]


def _find_at(repo: RepoCache, commit: str, wanted: Wanted, *, anyhow: bool) -> Path | None:
    listing = repo.read_listing(commit)
    if listing is not None:
        files = needed_files(repo, commit, listing.keys(), wanted, str(repo.folder))
        if files and all(repo.has(commit, listing[file]) for file in files):
            return model_path(repo, commit, files)
        if not anyhow:
            return None
    present = repo.files_of(commit)
    if not present:
        return None
    files = needed_files(repo, commit, present.keys(), wanted, str(repo.folder))
    if not files or not (anyhow or _is_certain(present, wanted)):
        return None
    is_complete = "config.json" in present or chooses_gguf(present.keys(), wanted)
    return model_path(repo, commit, files) if is_complete else None


def _is_certain(present: Collection[str], wanted: Wanted) -> bool:
    """Whether files that another program downloaded are the ones that the hub's listing would choose."""
    if wanted.names_gguf:
        return True
    if chooses_gguf(present, wanted):
        try:
            choose_gguf(present, Wanted(PREFERRED[0]), "")
        except ModelNotFoundError:
            return False
        return True
    return not wanted.is_heads and any(name in present for name in _TOKENIZERS)
