"""The hub's cache folder, laid out as huggingface_hub does, so that its tools and llama.cpp share the files.

models--user--repo/
    blobs/<SHA-256, or Git's hash of a small file>      <the same>.incomplete: a download that can be resumed
    snapshots/<commit>/<path> -> ../../blobs/<hash>
    refs/<branch or tag>                                the commit that it named when it was last looked up
    trees/<commit>.json                                 all files of the commit, with sizes and hashes
.locks/models--user--repo/<hash>.lock
"""

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from model_runner.hub.access import is_commit
from model_runner.json_files import LARGE, is_safe_path, read_object

PREFIX = "models--"
_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_TREE_VERSION = 1


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a commit."""

    path: str
    size: int
    git_hash: str
    sha256: str | None
    """None for small files, which Git has itself."""

    @property
    def blob(self) -> str:
        """Name of its content in the cache."""
        return self.sha256 or self.git_hash

    @property
    def is_safe(self) -> bool:
        """Whether its names can be used as paths: the hub may be a stranger's server."""
        return is_safe_path(self.path) and _HASH.fullmatch(self.blob) is not None and self.size >= 0


Listing = Mapping[str, HubFile]
"""The files of a commit by their paths."""


class RepoCache:
    """The cached files of one repository."""

    def __init__(self, cache: Path, repo: str) -> None:
        self._cache = cache
        self._name = PREFIX + repo.replace("/", "--")
        self.folder = cache / self._name

    def commit_of(self, revision: str) -> str | None:
        """The commit that a branch or tag named when it was last looked up; a commit is its own."""
        if is_commit(revision):
            return revision
        try:
            commit = (self.folder / "refs" / revision).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
        return commit if is_commit(commit) else None

    def remember(self, revision: str, commit: str) -> None:
        """Note which commit a branch or tag names now."""
        if revision != commit:
            write_atomically(self.folder / "refs" / revision, commit)

    def snapshot(self, commit: str) -> Path:
        """Folder of a commit's files."""
        return self.folder / "snapshots" / commit

    def snapshots(self) -> list[str]:
        """Commits of which there are files, newest first."""
        try:
            folders = [path for path in (self.folder / "snapshots").iterdir() if is_commit(path.name) and path.is_dir()]
        except OSError:
            return []
        return [path.name for path in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)]

    def files_of(self, commit: str) -> dict[str, int]:
        """Sizes of the files that are there, by their paths in the commit."""
        snapshot = self.snapshot(commit)
        found = {}
        for path in files_below(snapshot):
            with contextlib.suppress(OSError):
                if self.holds(path):
                    found[path.relative_to(snapshot).as_posix()] = path.stat().st_size
        return found

    def holds(self, path: Path) -> bool:
        """Whether a file is there, and inside the cache when links are followed."""
        return path.is_file() and is_inside(path, self._cache)

    def has(self, commit: str, file: HubFile) -> bool:
        """Whether a file of the commit is there, with the right size."""
        path = self.snapshot(commit) / file.path
        return self.holds(path) and path.stat().st_size == file.size

    def read_listing(self, commit: str) -> dict[str, HubFile] | None:
        """All files of a commit; None if they were not listed before."""
        try:
            tree = read_object(self.folder / "trees" / f"{commit}.json", most=LARGE)
            if tree["format_version"] != _TREE_VERSION:
                return None
            files = [
                HubFile(path, entry["size"], entry["blob_id"], entry.get("lfs_sha256"))
                for path, entry in tree["files"].items()
            ]
            return {file.path: file for file in files if file.is_safe}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def write_listing(self, commit: str, files: Listing) -> None:
        """Keep the files of a commit. Does nothing if the folder is not writable."""
        entries = {
            file.path: {"size": file.size, "blob_id": file.git_hash}
            | ({"lfs_sha256": file.sha256, "lfs_size": file.size} if file.sha256 else {})
            for file in files.values()
        }
        content = json.dumps({"format_version": _TREE_VERSION, "files": entries}, indent=1)
        with contextlib.suppress(OSError):
            write_atomically(self.folder / "trees" / f"{commit}.json", content)

    def blob(self, file: HubFile) -> Path:
        """Where the content of a file is, or will be."""
        return self.folder / "blobs" / file.blob

    @property
    def locks(self) -> Path:
        """Folder of the locks that huggingface_hub takes while it downloads."""
        return self._cache / ".locks" / self._name

    def lock(self, file: HubFile) -> Path:
        """The lock that huggingface_hub takes while it downloads this content."""
        return self.locks / f"{file.blob}.lock"

    def partials(self) -> list[Path]:
        """Parts of downloads that were interrupted, or still run."""
        return sorted((self.folder / "blobs").glob("*.incomplete"))

    def link(self, commit: str, file: HubFile) -> None:
        """Make a file of the commit point to its content; without symlinks, move the content there."""
        path, blob = self.snapshot(commit) / file.path, self.blob(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{uuid.uuid4().hex}")
        try:
            new.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:
            new = blob
        new.replace(path)


def repos_in(cache: Path) -> Iterator[tuple[str, RepoCache]]:
    """Name and cached files of each repository of models."""
    for folder in sorted(cache.glob(f"{PREFIX}*")):
        if folder.is_dir() and folder.name.isprintable():
            repo = folder.name.removeprefix(PREFIX).replace("--", "/")
            yield repo, RepoCache(cache, repo)


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path is in a folder when all links are followed."""
    return path.resolve().is_relative_to(folder.resolve())


def files_below(folder: Path) -> Iterator[Path]:
    """All files in a folder and below; links to folders are not followed."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)


def write_atomically(path: Path, content: str) -> None:
    """Write a file that other processes may be reading. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{uuid.uuid4().hex}")
    new.write_text(content, encoding="utf-8")
    new.replace(path)
