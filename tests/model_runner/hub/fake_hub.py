"""A hub on this machine: listings, redirects to another host, ranges, checksums, and all that goes wrong."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "f" * 40
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_API = re.compile(r"/api/models/([^/]+/[^/]+)/revision/([^/?]+)")


@dataclass
class Asked:
    """A request that the server got."""

    path: str
    range: str | None
    token: str | None


@dataclass
class FakeHub:
    """Its content, and how it behaves."""

    url: str = ""
    cdn: str = ""
    """The same server under another name."""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, COMMIT: COMMIT})
    files: dict[str, bytes] = field(default_factory=dict)
    """Files at other addresses, by their paths."""
    etags: dict[str, str] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """Bytes after which answers for a file break off, one for each request."""
    stalls: dict[str, list[int]] = field(default_factory=dict)
    """Bytes after which answers for a file wait for `goes_on`, one for each request."""
    stalled: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)
    failures: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Statuses and headers for the next requests for files."""
    sent_instead: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """Content type and content that come in place of a file."""
    ignores_ranges: bool = False
    hides_lengths: bool = False
    refusal: tuple[int, str] | None = None
    """Status and code for each listing."""
    listing: dict[str, Any] | None = None
    """Sent in place of the listing."""

    def add(self, repo: str, files: dict[str, bytes]) -> None:
        self.repos.setdefault(repo, {}).update(files)

    def paths(self, word: str) -> list[str]:
        """Paths of requests that contain a word."""
        return [one.path for one in self.asked if word in one.path]

    def siblings(self, repo: str) -> list[dict[str, Any]]:
        return [_sibling(path, content) for path, content in self.repos[repo].items()]


def _is_large(path: str) -> bool:
    return path.endswith((".gguf", ".safetensors"))


def _sibling(path: str, content: bytes) -> dict[str, Any]:
    git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": git}
    if _is_large(path):
        entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.hub
        path = urlsplit(self.path).path
        hub.asked.append(Asked(self.path, self.headers.get("range"), self.headers.get("authorization")))
        if api := _API.match(path):
            self._list(api[1], unquote(api[2]))
        elif hub.failures:
            status, headers = hub.failures.pop(0)
            self._answer(status, headers, b"")
        elif found := _RESOLVE.match(path):
            self._resolve(found[1], unquote(found[3]))
        elif path.startswith("/cdn/"):
            _, _, repo, name, file = unquote(path).split("/", 4)
            self._send(file, hub.repos[f"{repo}/{name}"][file], {"etag": f'"{hashlib.md5(file.encode()).hexdigest()}"'})
        elif path in hub.files:
            etag = hub.etags.get(path)
            self._send(path.rpartition("/")[2], hub.files[path], {} if etag is None else {"etag": etag})
        else:
            self._answer(404, {}, b"")

    def _list(self, repo: str, revision: str) -> None:
        hub = self.hub
        if hub.refusal is not None:
            self._answer(hub.refusal[0], {"x-error-code": hub.refusal[1]}, b"")
        elif hub.listing is not None:
            self._answer(200, {}, json.dumps(hub.listing).encode())
        elif repo not in hub.repos:
            self._answer(401, {"x-error-code": "RepoNotFound"}, b"")
        elif revision not in hub.revisions:
            self._answer(404, {"x-error-code": "RevisionNotFound"}, b"")
        else:
            content = {"id": repo, "sha": hub.revisions[revision], "siblings": hub.siblings(repo)}
            self._answer(200, {"content-type": "application/json"}, json.dumps(content).encode())

    def _resolve(self, repo: str, file: str) -> None:
        content = self.hub.repos[repo][file]
        if not _is_large(file):
            self._send(file, content, {})
            return
        digest = hashlib.sha256(content).hexdigest()
        headers = {"location": f"{self.hub.cdn}/cdn/{repo}/{file}?signature=x", "x-linked-etag": f'"{digest}"'}
        self._answer(302, headers, b"")

    def _send(self, file: str, content: bytes, headers: dict[str, str]) -> None:
        kind, content = self.hub.sent_instead.get(file, ("application/octet-stream", content))
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
        headers = {**headers, "content-type": kind}
        status, part = 200, content
        if asked and not self.hub.ignores_ranges:
            start, end = int(asked[1]), min(int(asked[2] or len(content)) + 1, len(content))
            status, part = 206, content[start:end]
            headers["content-range"] = f"bytes {start}-{end - 1}/{len(content)}"
        cuts, stalls = self.hub.cuts.get(file), self.hub.stalls.get(file)
        stall = stalls.pop(0) if stalls else len(part)
        self._answer(status, headers, part, cuts.pop(0) if cuts else None, stall)

    def _answer(
        self, status: int, headers: dict[str, str], content: bytes, cut: int | None = None, stall: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.hub.hides_lengths:
            self.send_header("connection", "close")
        else:
            self.send_header("content-length", str(len(content)))
        self.end_headers()
        if stall is not None and stall < len(content):
            self.wfile.write(content[:stall])
            self.hub.stalled.set()
            self.hub.goes_on.wait(60)
            content = content[stall:]
        self.wfile.write(content[:cut])
        if cut is not None or self.hub.hides_lengths:
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that went away."""


@contextmanager
def running() -> Iterator[FakeHub]:
    """A hub at an address of this machine, until the context ends."""
    hub = FakeHub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url, hub.cdn = (f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost"))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
