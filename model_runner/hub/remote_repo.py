"""A repository on the hub: its files, and the heads of its weights."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from model_runner.gguf.header import GgufFile
from model_runner.hub.access import HubAccess, hub_token, hub_url, is_commit
from model_runner.hub.remote_heads import read_gguf_head, read_safetensors_head
from model_runner.hub.store import HubFile, RepoCache
from model_runner.hub.transfer import TransferError, get
from model_runner.json_files import LARGE, parse_object

_TIMEOUT = httpx.Timeout(30.0, connect=10.0)


def open_client() -> httpx.Client:
    """A client that follows redirects; it sends a token only to the host that it was meant for."""
    return httpx.Client(follow_redirects=True, timeout=_TIMEOUT, headers={"user-agent": "samewise"})


class RemoteRepo:
    """A repository at a revision."""

    def __init__(self, repo: str, revision: str, access: HubAccess, client: httpx.Client) -> None:
        token = hub_token(access)
        self.revision = revision
        self.client = client
        self.headers: Mapping[str, str] = {} if token is None else {"authorization": f"Bearer {token}"}
        self.commit = ""
        self.listing: dict[str, HubFile] = {}
        self._repo = repo

    def look_up(self, cache: RepoCache | None = None) -> None:
        """Learn the commit and its files; files of a commit that the cache has listed are not asked for again.

        Raises:
            UnreachableError: if the hub does not answer.
            TransferError: if it refuses, or answers something else.
        """
        if cache is not None and is_commit(self.revision) and (known := cache.read_listing(self.revision)) is not None:
            self.commit, self.listing = self.revision, known
            return
        url = f"{hub_url()}/api/models/{self._repo}/revision/{quote(self.revision, safe='')}?blobs=true"
        answer = get(self.client, url, self.headers, self._repo)
        try:
            self.commit, self.listing = _read_listing(parse_object(answer.content, "its answer", most=LARGE))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TransferError(f"{hub_url()} does not answer like the hub ({error}); check HF_ENDPOINT") from error
        if cache is not None:
            cache.write_listing(self.commit, self.listing)

    def url(self, path: str) -> str:
        """Address of a file."""
        return f"{hub_url()}/{self._repo}/resolve/{self.commit}/{quote(path)}"

    def read_json(self, path: str) -> dict[str, Any]:
        """The content of a small file, or nothing if there is no such file.

        Raises TransferError, UnsupportedModelError.
        """
        if path not in self.listing:
            return {}
        return parse_object(get(self.client, self.url(path), self.headers, path).content, path)

    def gguf_heads(self, files: Iterable[HubFile]) -> list[GgufFile]:
        """Heads of GGUF files. Raises TransferError, UnsupportedModelError."""
        return [read_gguf_head(self.client, self.url(file.path), self.headers, Path(file.path))[0] for file in files]

    def safetensors_heads(self, files: Iterable[HubFile]) -> list[dict[str, Any]]:
        """Heads of safetensors files. Raises TransferError, UnsupportedModelError."""
        return [read_safetensors_head(self.client, self.url(file.path), self.headers, file.path) for file in files]


def _read_listing(answer: Any) -> tuple[str, dict[str, HubFile]]:
    """Commit and files of the hub's answer about a repository, without names that could leave the cache."""
    commit = answer["sha"]
    if not is_commit(commit):
        raise ValueError("it names no commit")
    files = []
    for entry in answer["siblings"]:
        lfs = entry.get("lfs") or {}
        size = lfs.get("size", entry.get("size"))
        if type(size) is not int or size < 0:
            raise ValueError(f"it says that a file has {str(size)[:40]} bytes")
        files.append(HubFile(entry["rfilename"], size, str(entry.get("blobId")), lfs.get("sha256")))
    return commit, {file.path: file for file in files if file.is_safe}
