"""Downloads of single files that survive lost connections and restarts, and are what they should be."""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import httpx

from model_runner.hub.limits import size_text
from model_runner.read_numbers import whole_number

CHUNK = 1 << 20
_LONG = 1 << 30
"""Bytes that take a second to hash."""
_LARGEST_ANSWER = 1 << 26
"""Bytes that are read of an answer that is not a file."""
_TRIES = 6
"""Attempts in a row without a new byte, before a download fails."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_RESET = re.compile(r"\bt=([0-9]{1,9})\b")
_POINTER = b"version https://git-lfs"
_CONTENT_RANGE = re.compile(r"bytes ([0-9]+)-[0-9]+/([0-9]+|\*)")


class TransferError(Exception):
    """A file cannot be downloaded; the message says why, and what to do."""


class UnreachableError(TransferError):
    """The server did not answer, or only that it is busy."""


class RefusedError(TransferError):
    """The server refused a request."""

    def __init__(self, status: int, code: str, reason: str) -> None:
        """`code` is the hub's own word, such as GatedRepo; empty if there is none."""
        super().__init__(reason)
        self.status = status
        self.code = code


class _LostError(Exception):
    """The connection was lost, or the server is busy; another attempt may succeed."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        """`wait`: seconds that the server asks to wait."""
        super().__init__(reason)
        self.wait = wait


class Progress(Protocol):
    """Shows how downloads advance. Several threads call it."""

    def start(self, name: str, size: int, done: int) -> None: ...
    def advance(self, name: str, num_bytes: int) -> None: ...
    def finish(self, name: str) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Item:
    """One file to download."""

    name: str
    """For people."""
    url: str
    target: Path
    lock: Path
    size: int
    sha256: str | None = None
    git_hash: str | None = None
    """Git's SHA-1 of a small file, which is checked if there is no SHA-256."""
    magic: bytes = b""
    """The first bytes that the content must have."""

    @property
    def partial(self) -> Path:
        return self.target.with_name(f"{self.target.name}.incomplete")

    @property
    def is_here(self) -> bool:
        """Whether the file is there, and was not cut off."""
        return self.target.is_file() and self.target.stat().st_size == self.size

    @property
    def bytes_left(self) -> int:
        """Bytes that have not arrived yet."""
        return 0 if self.is_here else max(self.size - _size(self.partial), 0)


class Transfers:
    """Downloads items; several threads may call `fetch`."""

    def __init__(self, client: httpx.Client, progress: Progress, stop: threading.Event | None = None) -> None:
        """Setting `stop` ends all downloads with a TransferError; what has arrived is kept."""
        self._client = client
        self._progress = progress
        self._stop = stop or threading.Event()

    def fetch(self, item: Item) -> str:
        """Download a file, continuing what an earlier attempt left, and return its SHA-256.

        The file appears under its name only when it is complete and has the right content.

        Raises:
            TransferError: if the server refuses, or sends something else.
            OSError: if the disk is full or not writable.
        """
        item.target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(item.lock, lambda: self._progress.note(f"Another process downloads {item.name}; waiting ...")):
            if item.is_here:
                return ""
            for _ in range(2):
                with _full_disk_named(item):
                    hashes = self._complete(item)
                if hashes.are_right:
                    item.partial.replace(item.target)
                    self._progress.finish(item.name)
                    return hashes.sha256
                item.partial.unlink()
        raise TransferError(
            f"{item.name} arrived twice with another content than its checksum says; try again later, and check "
            "proxies on the way"
        )

    def _complete(self, item: Item) -> "_Hashes":
        """Download what is missing; afterwards the partial file has all bytes."""
        if _size(item.partial) > item.size:
            item.partial.unlink()
        if _size(item.partial) > _LONG:
            self._progress.note(f"{item.name}: checking what has arrived before ...")
        hashes = _Hashes(item)
        with item.partial.open("a+b") as file:
            hashes.read(file, self._check_stop)
            self._progress.start(item.name, item.size, hashes.count)
            failures, furthest = 0, hashes.count
            while hashes.count < item.size:
                try:
                    self._receive(item, file, hashes)
                except _LostError as error:
                    failures = 1 if hashes.count > furthest else failures + 1
                    furthest = max(furthest, hashes.count)
                    if failures == _TRIES:
                        raise TransferError(
                            f"{item.name} cannot be downloaded: {error}; run it again to resume"
                        ) from error
                    self._stop.wait(_pause(failures, error))
            file.flush()
            os.fsync(file.fileno())
        return hashes

    def _receive(self, item: Item, file: BinaryIO, hashes: "_Hashes") -> None:
        """One request, from where the file ends. Raises _LostError if it ended early."""
        headers = {"accept-encoding": "identity"} | ({"range": f"bytes={hashes.count}-"} if hashes.count else {})
        with _connection(), self._client.stream("GET", item.url, headers=headers) as response:
            check_status(response, item.name)
            start, total = _extent(response)
            if start not in (0, hashes.count):
                raise TransferError(f"{item.name}: the server sent bytes from {start} on, not from {hashes.count}")
            _check_content(response, item, total)
            if start == 0 and hashes.count:  # the server sends no ranges
                file.truncate(0)
                hashes.clear()
                self._progress.start(item.name, item.size, 0)
            for chunk in response.iter_bytes():  # as they arrive: of larger ones, a lost connection would lose the last
                self._check_stop()
                if hashes.count == 0 and not chunk.startswith(item.magic[: len(chunk)]):
                    raise TransferError(f"{item.name}: {_described(chunk)}")
                if hashes.count + len(chunk) > item.size:
                    raise TransferError(f"{item.name} has more than the {item.size:,} bytes that were announced")
                file.write(chunk)
                hashes.update(chunk)
                self._progress.advance(item.name, len(chunk))
            if hashes.count < item.size:
                raise _LostError("the connection was closed early")

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise TransferError("the download was stopped; run it again to resume")


class _Hashes:
    """Hashes of what has arrived."""

    def __init__(self, item: Item) -> None:
        self._item = item
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(f"blob {self._item.size}\0".encode(), usedforsecurity=False)

    def read(self, file: BinaryIO, check: Callable[[], None]) -> None:
        """Take in what an earlier attempt left, and leave the file at its end."""
        file.seek(0)
        while chunk := file.read(CHUNK):
            check()
            self.update(chunk)

    def update(self, chunk: bytes) -> None:
        self.count += len(chunk)
        self._sha256.update(chunk)
        if self._item.sha256 is None:
            self._git.update(chunk)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def are_right(self) -> bool:
        """Whether the content is the expected one, as far as its hash is known."""
        if self._item.sha256 is not None:
            return self.sha256 == self._item.sha256
        return self._item.git_hash in (None, self._git.hexdigest())


def check_status(response: httpx.Response, name: str) -> None:
    """Raise _LostError for what may be tried again, RefusedError for every other status than success."""
    status = response.status_code
    if status in _RETRIED:
        raise _LostError(f"the server answered {status} {response.reason_phrase}", _wait_of(response))
    if status not in (200, 206):
        code = response.headers.get("x-error-code", "")
        reason = (response.headers.get("x-error-message") or response.reason_phrase)[:200]
        printable = "".join(filter(str.isprintable, reason))
        raise RefusedError(status, code, f"{name}: the server answered {status} {printable}")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a small request."""

    content: bytes
    headers: tuple[httpx.Headers, ...]
    """Headers of each redirect, then of the answer itself."""

    def header(self, name: str) -> str | None:
        """The first value of a header on the way."""
        return next((headers[name] for headers in self.headers if name in headers), None)


def get(client: httpx.Client, url: str, name: str, first: int | None = None) -> Answer:
    """The answer to a small request, or the first bytes of a file; tried again like a download, but not as often.

    Args:
        client: the client to send it with.
        url: address.
        name: what is asked for, for errors.
        first: bytes to ask for; by default all.

    Raises:
        RefusedError: if the server refuses.
        UnreachableError: if there is no answer.
    """
    headers = {} if first is None else {"range": f"bytes=0-{first - 1}", "accept-encoding": "identity"}
    failures = 0
    while True:
        try:
            with _connection(), client.stream("GET", url, headers=headers) as response:
                check_status(response, name)
                content = next(response.iter_bytes(first or _LARGEST_ANSWER), b"")
                return Answer(content, tuple(one.headers for one in (*response.history, response)))
        except _LostError as error:
            failures += 1
            if failures == (_TRIES if error.wait is not None else _TRIES // 3):
                raise UnreachableError(str(error)) from error
            threading.Event().wait(_pause(failures, error))


def _pause(failures: int, error: _LostError) -> float:
    """Seconds until the next attempt: as the server asks, otherwise doubled each time."""
    wait = _FIRST_WAIT_S * 2.0 ** (failures - 1) if error.wait is None else error.wait
    return min(wait, _LONGEST_WAIT_S)


@contextmanager
def _connection() -> Iterator[None]:
    """Turn a lost connection into a _LostError."""
    try:
        yield
    except httpx.TooManyRedirects as error:
        raise TransferError(f"{error.request.url.host} redirects in a circle; check HF_ENDPOINT and proxies") from error
    except (httpx.TransportError, httpx.DecodingError) as error:
        raise _LostError(f"{type(error).__name__}: {error}".rstrip(": ")) from error


def _wait_of(response: httpx.Response) -> float | None:
    """Seconds that the server asks to wait: Retry-After, or the end of the hub's rate limit."""
    after = whole_number(response.headers.get("retry-after", ""))
    if after is not None:
        return float(after)
    reset = _RESET.search(response.headers.get("ratelimit", "")) if response.status_code == 429 else None
    return None if reset is None else float(reset[1])


def _extent(response: httpx.Response) -> tuple[int, int | None]:
    """The first byte that the answer has, and the size of the whole file, if the server says it."""
    if response.status_code == 206:
        found = _CONTENT_RANGE.match(response.headers.get("content-range", ""))
        first = None if found is None else whole_number(found[1])
        if found is None or first is None:
            raise TransferError("the server sent a part of the file without saying which")
        return first, whole_number(found[2])
    length = whole_number(response.headers.get("content-length", ""))
    return 0, None if "content-encoding" in response.headers else length


def _check_content(response: httpx.Response, item: Item, total: int | None) -> None:
    """Refuse an answer that is not the file."""
    if "text/html" in response.headers.get("content-type", "") and not item.name.endswith((".html", ".txt", ".md")):
        raise TransferError(f"{item.name}: {_described(b'<html')}")
    if total is not None and total != item.size:
        head = next(response.iter_bytes(CHUNK), b"")
        raise TransferError(f"{item.name}: {_described(head)}; it has {total:,} bytes instead of {item.size:,}")


def _described(head: bytes) -> str:
    """Name the content that came instead of the file, by its first bytes."""
    if head.lstrip()[:5].lower() in (b"<html", b"<!doc"):
        return "the server sent a web page instead of the file; check the address, HF_ENDPOINT and proxies"
    if head.startswith(_POINTER):
        return "the server sent a Git LFS pointer instead of the file; check HF_ENDPOINT"
    return "the server sent another content than the file"


@contextmanager
def _full_disk_named(item: Item) -> Iterator[None]:
    """Turn the error of a full disk into a TransferError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        missing = item.size - _size(item.partial)
        left = size_text(missing) if missing > 0 else "some room"
        raise TransferError(
            f"the disk of {item.target.parent} is full; free {left} and run it again to resume, or remove what has "
            "arrived with `samewise rm`"
        ) from error


@contextmanager
def _locked(path: Path, waiting: Callable[[], Any]) -> Iterator[None]:
    """Keep other processes from downloading the same file; without effect where the file system has no locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
        yield


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
