"""Models of the hub and of URLs: from the cache if they are complete there, otherwise downloaded into it.

A start never asks the network for a model that is complete on disk; only HubAccess.updates looks for a newer commit.
"""

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console

from model_runner.hub.access import HubAccess, hub_cache, hub_token, hub_url, is_commit
from model_runner.hub.cached import Found, model_path, needed_files
from model_runner.hub.choice import Wanted, chooses_gguf
from model_runner.hub.limits import check_architecture, check_disk, check_memory
from model_runner.hub.names import HubName
from model_runner.hub.progress import open_progress
from model_runner.hub.refusals import refusals_named
from model_runner.hub.remote import (
    least_bytes_of_gguf,
    least_bytes_of_safetensors,
    read_gguf_head,
    read_safetensors_head,
)
from model_runner.hub.store import HubFile, RepoCache
from model_runner.hub.transfer import Item, TransferError, Transfers, get

_WORKERS = 4
"""Files downloaded at the same time."""
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)


def download_model(name: HubName, revision: str, wanted: Wanted, access: HubAccess, console: Console) -> Found:
    """Download what is missing of a model into the hub's cache.

    Args:
        name: its repository.
        revision: branch, tag or commit.
        wanted: which model of the repository.
        access: token and limits.
        console: shows the progress.

    Raises:
        UnreachableError: if the hub does not answer.
        ModelNotFoundError: if there is no such model, it does not fit, or it cannot be downloaded.
    """
    console.print(f"Looking for {name} on the hub ...", markup=False, highlight=False)
    with refusals_named(name, revision), open_client() as client:
        return _Download(name, revision, wanted, access, console, client).run()


def open_client() -> httpx.Client:
    """A client that follows redirects; it sends a token only to the host that it was meant for."""
    return httpx.Client(follow_redirects=True, timeout=_TIMEOUT, headers={"user-agent": "samewise"})


class _Download:
    """The download of one model."""

    def __init__(
        self,
        name: HubName,
        revision: str,
        wanted: Wanted,
        access: HubAccess,
        console: Console,
        client: httpx.Client,
    ) -> None:
        token = hub_token(access)
        self._name = name
        self._revision = revision
        self._wanted = wanted
        self._repo = RepoCache(hub_cache(), name.repo)
        self._access = access
        self._console = console
        self._client = client
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._commit = ""
        self._listing: dict[str, HubFile] = {}
        self._digests: dict[Path, str] = {}

    def run(self) -> Found:
        """Raises TransferError, OSError, ModelNotFoundError."""
        self._look_up()
        files = self._needed()
        if files is None:
            small = [path for path in self._listing if path.endswith(".json") and "/" not in path]
            self._fetch(small)
            files = self._needed() or []
        self._check(files)
        self._fetch(files)
        self._repo.remember(self._revision, self._commit)
        return Found(model_path(self._repo, self._commit, files), self._commit, self._digests)

    def _needed(self) -> list[str] | None:
        return needed_files(self._repo, self._commit, self._listing.keys(), self._wanted, self._name.repo)

    def _look_up(self) -> None:
        """Learn the commit and its files."""
        if is_commit(self._revision) and (listing := self._repo.read_listing(self._revision)) is not None:
            self._commit, self._listing = self._revision, listing
            return
        url = f"{hub_url()}/api/models/{self._name.repo}/revision/{quote(self._revision, safe='')}?blobs=true"
        answer = get(self._client, url, self._headers, str(self._name))
        try:
            self._commit, self._listing = _read_listing(json.loads(answer.content))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TransferError(f"{hub_url()} does not answer like the hub ({error}); check HF_ENDPOINT") from error
        self._repo.write_listing(self._commit, self._listing)

    def _url(self, path: str) -> str:
        return f"{hub_url()}/{self._name.repo}/resolve/{self._commit}/{quote(path)}"

    def _missing(self, paths: Iterable[str]) -> list[HubFile]:
        """Files whose content is not there yet, each content once."""
        files = {self._repo.blob(self._listing[path]): self._listing[path] for path in paths}
        return [file for blob, file in files.items() if not blob.exists()]

    def _check(self, paths: Sequence[str]) -> None:
        """Refuse what does not fit, or cannot be read, before its download."""
        missing = self._missing(path for path in paths if not self._repo.has(self._commit, self._listing[path]))
        check_disk(str(self._name), hub_cache(), sum(self._bytes_left(file) for file in missing))
        if missing and not self._wanted.is_heads:
            weights = [self._listing[path] for path in paths if path.endswith((".gguf", ".safetensors"))]
            self._check_heads(weights)

    def _check_heads(self, weights: Sequence[HubFile]) -> None:
        size = sum(file.size for file in weights)
        may_be_too_large = self._access.max_bytes is not None and size > self._access.max_bytes
        if chooses_gguf(self._listing.keys(), self._wanted):
            read = [weights[0], *(weights[1:] if may_be_too_large else ())]
            heads = [
                read_gguf_head(self._client, self._url(file.path), self._headers, Path(file.path))[0] for file in read
            ]
            check_architecture(heads[0])
            least = least_bytes_of_gguf(heads)
        elif may_be_too_large:
            least = least_bytes_of_safetensors(
                read_safetensors_head(self._client, self._url(file.path), self._headers, file.path) for file in weights
            )
        else:
            return
        check_memory(str(self._name), least, self._access.max_bytes)

    def _bytes_left(self, file: HubFile) -> int:
        partial = self._item(file).partial
        return file.size - (min(partial.stat().st_size, file.size) if partial.exists() else 0)

    def _item(self, file: HubFile) -> Item:
        return Item(
            file.path,
            self._url(file.path),
            self._repo.blob(file),
            self._repo.lock(file),
            file.size,
            file.sha256,
            None if file.sha256 else file.git_hash,
            self._headers,
        )

    def _fetch(self, paths: Sequence[str]) -> None:
        """Download the content of these files, and link them into the snapshot."""
        needed = [path for path in paths if not self._repo.has(self._commit, self._listing[path])]
        self._digests |= fetch_all([self._item(file) for file in self._missing(needed)], self._client, self._console)
        for path in needed:
            self._repo.link(self._commit, self._listing[path])


def _read_listing(answer: Any) -> tuple[str, dict[str, HubFile]]:
    """Commit and files of the hub's answer about a repository, without names that could leave the cache."""
    commit = answer["sha"]
    if not is_commit(commit):
        raise ValueError("it names no commit")
    files = []
    for entry in answer["siblings"]:
        lfs = entry.get("lfs") or {}
        size = lfs.get("size", entry.get("size"))
        files.append(HubFile(entry["rfilename"], int(size), str(entry.get("blobId")), lfs.get("sha256")))
    return commit, {file.path: file for file in files if file.is_safe}


def fetch_all(items: Sequence[Item], client: httpx.Client, console: Console) -> dict[Path, str]:
    """Download several files at once; the SHA-256 of each.

    An interrupt (an exception in the calling thread) ends it at once; what has arrived is kept.

    Raises:
        TransferError, OSError: the first error of a file; the other downloads end.
    """
    if not items:
        return {}
    digests: dict[Path, str] = {}
    errors: list[Exception] = []
    stop = threading.Event()
    waiting = list(reversed(items))
    sizes = [item.size for item in items]
    with open_progress(console, None if None in sizes else sum(size or 0 for size in sizes)) as progress:
        transfers = Transfers(client, progress, stop)

        def work() -> None:
            while waiting and not stop.is_set():
                try:
                    item = waiting.pop()
                    digests[item.target] = transfers.fetch(item)
                except IndexError:  # another thread was faster
                    return
                except Exception as error:  # noqa: BLE001 - raised below
                    errors.append(error)
                    stop.set()

        workers = [threading.Thread(target=work, daemon=True) for _ in range(min(_WORKERS, len(items)))]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            stop.set()
    if errors:
        raise errors[0]
    return {path: digest for path, digest in digests.items() if digest}
