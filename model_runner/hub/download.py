"""Downloads of models: of the hub into its cache, of URLs into folders of Samewise's own."""

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx
from rich.console import Console

from model_runner.hub.access import HubAccess, hub_cache
from model_runner.hub.cached import SOURCE, Found, model_path, needed_files, targets_of, urls_of_parts
from model_runner.hub.choice import WEIGHTS, Wanted, chooses_gguf
from model_runner.hub.limits import (
    check_architecture,
    check_disk,
    check_memory,
    least_bytes_of_gguf,
    least_bytes_of_safetensors,
)
from model_runner.hub.names import FileUrl, HubName
from model_runner.hub.progress import open_progress
from model_runner.hub.remote import RemoteRepo, connected, look_up, read_gguf_head
from model_runner.hub.store import HubFile, RepoCache, write_atomically
from model_runner.hub.transfer import Answer, Item, TransferError, Transfers
from model_runner.json_files import read_object
from model_runner.read_numbers import whole_number

_WORKERS = 4
"""Files downloaded at the same time."""
_SHA256_DIGITS = 64


def download_model(name: HubName, revision: str, wanted: Wanted, access: HubAccess, console: Console) -> Found:
    """Download what is missing of a model at a branch, tag or commit into the hub's cache.

    Raises:
        UnreachableError: if the hub does not answer.
        ModelNotFoundError: if there is no such model, it does not fit, or it cannot be downloaded.
    """
    console.print(f"Looking for {name} on the hub ...", markup=False, highlight=False)
    cache = RepoCache(hub_cache(), name.repo)
    with connected(name, revision, access) as client:
        source = look_up(client, name.repo, revision, cache)
        found = _ModelDownload(str(name), source, wanted, cache, console).run(access.max_bytes)
        cache.remember(revision, source.commit)
        return found


class _ModelDownload:
    """The download of one model of the hub."""

    def __init__(self, name: str, source: RemoteRepo, wanted: Wanted, cache: RepoCache, console: Console) -> None:
        self._name = name
        self._source = source
        self._wanted = wanted
        self._cache = cache
        self._console = console
        self._digests: dict[Path, str] = {}

    def run(self, most: int | None) -> Found:
        """Refuse what does not fit, needs more than `most` bytes of memory, or cannot be read; download the others.

        Raises TransferError, OSError, ModelNotFoundError, UnsupportedModelError.
        """
        files = self._needed()
        if files is None:
            self._fetch([path for path in self._source.listing if path.endswith(".json") and "/" not in path])
            files = self._needed() or []
        missing = self._missing(self._unlinked(files))
        check_disk(self._name, hub_cache(), sum(item.bytes_left for item in missing))
        if missing and not self._wanted.is_heads:
            self._check_weights([path for path in files if path.endswith(WEIGHTS)], most)
        self._fetch(files)
        commit = self._source.commit
        return Found(model_path(self._cache, commit, files), commit, self._digests)

    def _needed(self) -> list[str] | None:
        return needed_files(self._cache, self._source.commit, self._source.listing.keys(), self._wanted, self._name)

    def _unlinked(self, paths: Iterable[str]) -> list[HubFile]:
        """Files that are not in the snapshot yet."""
        files = [self._source.listing[path] for path in paths]
        return [file for file in files if not self._cache.has(self._source.commit, file)]

    def _missing(self, files: Iterable[HubFile]) -> list[Item]:
        """Files whose content is not there yet, each content once."""
        items = {file.blob: self._item(file) for file in files}
        return [item for item in items.values() if not item.is_here]

    def _check_weights(self, paths: Sequence[str], most: int | None) -> None:
        may_be_too_large = most is not None and sum(self._source.listing[path].size for path in paths) > most
        if chooses_gguf(self._source.listing.keys(), self._wanted):
            heads = [self._source.gguf_head(path) for path in (paths if may_be_too_large else paths[:1])]
            check_architecture(heads[0])
            check_memory(self._name, least_bytes_of_gguf(heads), most)
        elif may_be_too_large:
            check_memory(self._name, least_bytes_of_safetensors(map(self._source.safetensors_head, paths)), most)

    def _item(self, file: HubFile) -> Item:
        blob, git_hash = self._cache.blob(file), None if file.sha256 else file.git_hash
        url, lock = self._source.url(file.path), self._cache.lock(file)
        return Item(file.path, url, blob, lock, file.size, file.sha256, git_hash)

    def _fetch(self, paths: Sequence[str]) -> None:
        """Download the content of these files, and link them into the snapshot."""
        unlinked = self._unlinked(paths)
        self._digests |= fetch_all(self._missing(unlinked), self._source.client, self._console)
        for file in unlinked:
            self._cache.link(self._source.commit, file)


def download_url(name: FileUrl, cache: Path, access: HubAccess, console: Console) -> Found:
    """Download all parts of a GGUF file into a folder of the cache, or what is missing of them, or a newer version.

    Raises:
        UnreachableError: if the server does not answer.
        ModelNotFoundError: if there is no such file, it does not fit, or it cannot be downloaded.
    """
    targets = targets_of(name, cache)
    with connected(name) as client:
        urls = urls_of_parts(name)
        read = [read_gguf_head(client, url, target) for url, target in zip(urls, targets, strict=True)]
        heads = [head for head, _ in read]
        answers = [answer for _, answer in read]
        _forget_other_versions(name.address, targets, [_version(answer) for answer in answers])
        items = [_item_of_url(*one) for one in zip(urls, targets, answers, strict=True)]
        check_architecture(heads[0])
        check_memory(name.address, least_bytes_of_gguf(heads), access.max_bytes)
        check_disk(name.address, targets[0].parent, sum(item.bytes_left for item in items))
        return Found(targets[0], digests=fetch_all(items, client, console))


def _forget_other_versions(address: str, targets: Sequence[Path], versions: Sequence[str]) -> None:
    """Delete what is there of another version, or of one that cannot be told from others; note the version."""
    source = targets[0].with_name(SOURCE)
    try:
        known = read_object(source)["versions"]
    except (OSError, ValueError, LookupError, TypeError):
        known = []
    if known != versions or "" in versions:
        for target in targets:
            for path in (target, target.with_name(f"{target.name}.incomplete")):
                path.unlink(missing_ok=True)
    write_atomically(source, json.dumps({"url": address, "versions": versions}, indent=2))


def _item_of_url(url: str, target: Path, answer: Answer) -> Item:
    lock = target.with_name(f"{target.name}.lock")
    return Item(target.name, url, target, lock, _size(answer), _sha256(answer), magic=b"GGUF")


def _version(answer: Answer) -> str:
    """A tag that a later content at the same address does not have; empty if the server gives none."""
    return answer.header("etag") or answer.header("last-modified") or ""


def _sha256(answer: Answer) -> str | None:
    """The content's hash, if the server uses it as its tag, as the hub and its mirrors do."""
    for name in ("x-linked-etag", "etag"):
        tag = (answer.header(name) or "").removeprefix("W/").strip('"').lower()
        if len(tag) == _SHA256_DIGITS and all(digit in "0123456789abcdef" for digit in tag):
            return tag
    return None


def _size(answer: Answer) -> int:
    """Bytes of the whole file. Raises TransferError if the server does not say it."""
    last = answer.headers[-1]
    size = whole_number(last.get("content-range", "").rpartition("/")[2] or last.get("content-length", ""))
    if size is None:
        raise TransferError("the server does not say how large the file is")
    return size


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
