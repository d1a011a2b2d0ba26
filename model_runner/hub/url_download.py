"""Downloads of GGUF files of URLs outside of the hub."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console

from model_runner.gguf.header import GgufFile
from model_runner.hub.access import HubAccess
from model_runner.hub.cached import Found
from model_runner.hub.download import fetch_all
from model_runner.hub.limits import check_architecture, check_disk, check_memory
from model_runner.hub.names import FileUrl
from model_runner.hub.remote_heads import least_bytes_of_gguf, read_gguf_head
from model_runner.hub.transfer import Answer, Item, TransferError
from model_runner.hub.url_cache import SOURCE
from model_runner.json_files import read_object
from model_runner.read_numbers import whole_number

_SHA256_DIGITS = 64


def download_url(
    name: FileUrl,
    urls: Sequence[str],
    targets: Sequence[Path],
    access: HubAccess,
    console: Console,
    client: httpx.Client,
) -> Found:
    """Download all parts of a GGUF file, or what is missing of them, or a newer version.

    Args:
        name: the file, or one of its parts.
        urls: address of each part.
        targets: where each part is kept.
        access: limits.
        console: shows the progress.
        client: the client to ask with.

    Raises:
        TransferError, OSError, UnsupportedModelError, ModelNotFoundError: why not.
    """
    return _Download(name.address, urls, targets, access, console, client).run()


class _Download:
    """The download of all parts of a file."""

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        targets: Sequence[Path],
        access: HubAccess,
        console: Console,
        client: httpx.Client,
    ) -> None:
        self._name = name
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
            known = read_object(self._source)["versions"]
        except (OSError, ValueError, LookupError, TypeError):
            known = []
        if known != list(versions) or "" in versions:
            for target in self._targets:
                for path in (target, target.with_name(f"{target.name}.incomplete")):
                    path.unlink(missing_ok=True)
        self._targets[0].parent.mkdir(parents=True, exist_ok=True)
        self._write(versions)

    def _write(self, versions: Sequence[str]) -> None:
        content = {"url": self._name, "versions": list(versions)}
        new = self._source.with_suffix(".new")
        new.write_text(json.dumps(content, indent=2), encoding="utf-8")
        new.replace(self._source)

    def _item(self, index: int, answer: Answer) -> Item:
        target = self._targets[index]
        lock = target.with_name(f"{target.name}.lock")
        return Item(target.name, self._urls[index], target, lock, _size(answer), _sha256(answer), magic=b"GGUF")

    def _check(self, heads: Sequence[GgufFile], items: Sequence[Item]) -> None:
        check_architecture(heads[0])
        check_memory(self._name, least_bytes_of_gguf(heads), self._access.max_bytes)
        left = 0
        for item in items:
            with contextlib.suppress(FileNotFoundError):
                left -= item.partial.stat().st_size
            left += 0 if item.target.exists() else item.size
        check_disk(self._name, self._source.parent, max(left, 0))


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
    text = last.get("content-range", "").rpartition("/")[2] or last.get("content-length", "")
    size = whole_number(text)
    if size is None:
        raise TransferError("the server does not say how large the file is")
    return size
