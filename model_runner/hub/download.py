"""Downloads of models of the hub into its cache."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx
from rich.console import Console

from model_runner.hub.access import HubAccess, hub_cache
from model_runner.hub.cached import Found, model_path, needed_files
from model_runner.hub.choice import WEIGHTS, Wanted, chooses_gguf
from model_runner.hub.limits import check_architecture, check_disk, check_memory
from model_runner.hub.names import HubName
from model_runner.hub.progress import open_progress
from model_runner.hub.refusals import refusals_named
from model_runner.hub.remote_heads import least_bytes_of_gguf, least_bytes_of_safetensors
from model_runner.hub.remote_repo import RemoteRepo, open_client
from model_runner.hub.store import HubFile, RepoCache
from model_runner.hub.transfer import Item, Transfers

_WORKERS = 4
"""Files downloaded at the same time."""


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
        source = RemoteRepo(name.repo, revision, access, client)
        return _Download(name, source, wanted, RepoCache(hub_cache(), name.repo), access, console).run()


class _Download:
    """The download of one model."""

    def __init__(
        self, name: HubName, source: RemoteRepo, wanted: Wanted, repo: RepoCache, access: HubAccess, console: Console
    ) -> None:
        self._name = str(name)
        self._source = source
        self._wanted = wanted
        self._repo = repo
        self._access = access
        self._console = console
        self._digests: dict[Path, str] = {}

    def run(self) -> Found:
        """Raises TransferError, OSError, ModelNotFoundError, UnsupportedModelError."""
        self._source.look_up(self._repo)
        files = self._needed()
        if files is None:
            self._fetch([path for path in self._source.listing if path.endswith(".json") and "/" not in path])
            files = self._needed() or []
        self._check(files)
        self._fetch(files)
        self._repo.remember(self._source.revision, self._source.commit)
        return Found(model_path(self._repo, self._source.commit, files), self._source.commit, self._digests)

    def _needed(self) -> list[str] | None:
        listing, commit = self._source.listing, self._source.commit
        return needed_files(self._repo, commit, listing.keys(), self._wanted, self._name)

    def _unlinked(self, paths: Iterable[str]) -> list[HubFile]:
        """Files that are not in the snapshot yet."""
        files = [self._source.listing[path] for path in paths]
        return [file for file in files if not self._repo.has(self._source.commit, file)]

    def _missing(self, files: Iterable[HubFile]) -> list[HubFile]:
        """Files whose content is not there yet, or was cut off, each content once."""
        by_content = {self._repo.blob(file): file for file in files}
        return [file for blob, file in by_content.items() if not blob.exists() or blob.stat().st_size != file.size]

    def _check(self, paths: Sequence[str]) -> None:
        """Refuse what does not fit, or cannot be read, before its download."""
        missing = self._missing(self._unlinked(paths))
        check_disk(self._name, hub_cache(), sum(self._bytes_left(file) for file in missing))
        if missing and not self._wanted.is_heads:
            self._check_heads([self._source.listing[path] for path in paths if path.endswith(WEIGHTS)])

    def _check_heads(self, weights: Sequence[HubFile]) -> None:
        most = self._access.max_bytes
        may_be_too_large = most is not None and sum(file.size for file in weights) > most
        if chooses_gguf(self._source.listing.keys(), self._wanted):
            heads = self._source.gguf_heads(weights if may_be_too_large else weights[:1])
            check_architecture(heads[0])
            least = least_bytes_of_gguf(heads)
        elif may_be_too_large:
            least = least_bytes_of_safetensors(self._source.safetensors_heads(weights))
        else:
            return
        check_memory(self._name, least, most)

    def _bytes_left(self, file: HubFile) -> int:
        partial = self._item(file).partial
        return file.size - (min(partial.stat().st_size, file.size) if partial.exists() else 0)

    def _item(self, file: HubFile) -> Item:
        return Item(
            file.path,
            self._source.url(file.path),
            self._repo.blob(file),
            self._repo.lock(file),
            file.size,
            file.sha256,
            None if file.sha256 else file.git_hash,
            self._source.headers,
        )

    def _fetch(self, paths: Sequence[str]) -> None:
        """Download the content of these files, and link them into the snapshot."""
        unlinked = self._unlinked(paths)
        items = [self._item(file) for file in self._missing(unlinked)]
        for item in items:
            if item.target.exists() and item.target.stat().st_size != item.size:
                item.target.unlink()
        self._digests |= fetch_all(items, self._source.client, self._console)
        for file in unlinked:
            self._repo.link(self._source.commit, file)


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
    with open_progress(console, sum(item.size for item in items)) as progress:
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
