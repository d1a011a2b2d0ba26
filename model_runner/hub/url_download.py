"""GGUF files of URLs outside of the hub, kept in a folder for each URL."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
from rich.console import Console

from model_runner.gguf.header import GgufFile, parts_of
from model_runner.hub.access import HubAccess, ModelNotFoundError, is_offline
from model_runner.hub.cached import Found
from model_runner.hub.download import fetch_all, open_client
from model_runner.hub.limits import check_architecture, check_disk, check_memory
from model_runner.hub.names import FileUrl
from model_runner.hub.refusals import refusals_named
from model_runner.hub.remote import least_bytes_of_gguf, read_gguf_head
from model_runner.hub.transfer import Answer, Item, TransferError, UnreachableError

FOLDER = "downloads"
SOURCE = "source.json"
_SHA256_DIGITS = 64


def fetch_url(name: FileUrl, cache: Path, access: HubAccess, console: Console) -> Found:
    """A GGUF file, with all of its parts, downloaded into a folder of the cache at first use.

    Raises:
        ModelNotFoundError: if it cannot be downloaded, or does not fit.
    """
    if access.revision is not None:
        raise ModelNotFoundError(f"revision {access.revision} applies to models of the hub, not to a URL; leave it out")
    url = urlsplit(name.url)
    files = [part.name for part in parts_of(Path(name.file))]
    folder = url.path.rpartition("/")[0]
    urls = [url._replace(path=f"{folder}/{quote(file)}").geturl() for file in files]
    own = cache / FOLDER / hashlib.sha256(urls[0].encode()).hexdigest()[:16]
    targets = [own / file for file in files]
    if (own / SOURCE).is_file() and all(map(Path.is_file, targets)) and (not access.updates or is_offline()):
        return Found(targets[0])
    if is_offline():
        raise ModelNotFoundError(f"{name.url} was not downloaded before, and HF_HUB_OFFLINE forbids its download")
    try:
        with refusals_named(name), open_client() as client:
            return _Download(urls, targets, access, console, client).run()
    except UnreachableError as error:
        raise ModelNotFoundError(f"{name.url} cannot be reached: {error}; check the address and the network") from error


class _Download:
    """The download of all parts of a file."""

    def __init__(
        self, urls: Sequence[str], targets: Sequence[Path], access: HubAccess, console: Console, client: httpx.Client
    ) -> None:
        self._urls = urls
        self._targets = targets
        self._access = access
        self._console = console
        self._client = client
        self._source = targets[0].with_name(SOURCE)

    def run(self) -> Found:
        """Raises TransferError, OSError, ModelNotFoundError, UnsupportedModelError."""
        read = [
            read_gguf_head(self._client, url, {}, target) for url, target in zip(self._urls, self._targets, strict=True)
        ]
        heads, answers = [head for head, _ in read], [answer for _, answer in read]
        versions = [_version(answer) for answer in answers]
        self._forget_others(versions)
        items = [self._item(index, answer) for index, answer in enumerate(answers)]
        self._check(heads, items)
        digests = fetch_all(items, self._client, self._console)
        self._write(versions)
        return Found(self._targets[0], digests=digests)

    def _forget_others(self, versions: Sequence[str]) -> None:
        """Delete what is there of another version, or of one that cannot be told from others."""
        try:
            known = json.loads(self._source.read_bytes())["versions"]
        except (OSError, ValueError, LookupError, TypeError):
            known = []
        if known != list(versions) or "" in versions:
            for target in self._targets:
                for path in (target, target.with_name(f"{target.name}.incomplete")):
                    path.unlink(missing_ok=True)
        self._targets[0].parent.mkdir(parents=True, exist_ok=True)
        self._write(versions)

    def _write(self, versions: Sequence[str]) -> None:
        content = {"url": self._urls[0], "versions": list(versions)}
        new = self._source.with_suffix(".new")
        new.write_text(json.dumps(content, indent=2), encoding="utf-8")
        new.replace(self._source)

    def _item(self, index: int, answer: Answer) -> Item:
        target = self._targets[index]
        lock = target.with_name(f"{target.name}.lock")
        return Item(target.name, self._urls[index], target, lock, _size(answer), _sha256(answer), magic=b"GGUF")

    def _check(self, heads: Sequence[GgufFile], items: Sequence[Item]) -> None:
        check_architecture(heads[0])
        check_memory(self._urls[0], least_bytes_of_gguf(heads), self._access.max_bytes)
        left = 0
        for item in items:
            with contextlib.suppress(FileNotFoundError):
                left -= item.partial.stat().st_size
            left += 0 if item.target.exists() else item.size or 0
        check_disk(self._urls[0], self._source.parent, max(left, 0))


def _version(answer: Answer) -> str:
    """What tells this content from a later one at the same address; empty if nothing does."""
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
    text = last.get("content-range", "").rpartition("/")[2] or last.get("content-length", "")
    if not text.isdigit():
        raise TransferError("the server does not say how large the file is")
    return int(text)
