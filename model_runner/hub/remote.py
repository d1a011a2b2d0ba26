"""Models on a server: the hub's lists of files, the heads of weight files, and what is said when one is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from model_runner.gguf.header import GgufFile, IncompleteHeadError, parse_head
from model_runner.hub.access import HUB_URL, HubAccess, ModelNotFoundError, hub_cache, hub_token, hub_url, is_commit
from model_runner.hub.cached import urls_of_parts
from model_runner.hub.choice import Wanted, choose_gguf, choose_weights, chooses_gguf
from model_runner.hub.description import Description, describe_gguf, describe_safetensors
from model_runner.hub.names import FileUrl, HubName, revision_of
from model_runner.hub.store import HubFile, Listing, RepoCache
from model_runner.hub.transfer import Answer, RefusedError, TransferError, UnreachableError, get
from model_runner.json_files import LARGE, parse_object
from model_runner.refusal import UnsupportedModelError, refused
from model_runner.weights.safetensors_head import end_of_head, parse_safetensors_head

_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_FIRST = 1 << 21
_LARGEST = 1 << 27
"""Bytes: no head is larger. One with 150,000 tokens and their merges has 8 MiB."""
_NOT_HERE = "is not a folder or GGUF file on this machine"


@contextmanager
def connected(name: HubName | FileUrl, revision: str = "", access: HubAccess | None = None) -> Iterator[httpx.Client]:
    """A client to ask for one model; it sends the token of `access` to the host that it is meant for, and no other.

    Raises:
        UnreachableError: as it is.
        ModelNotFoundError: for all other errors of a download.
    """
    token = None if access is None else hub_token(access)
    headers = {"user-agent": "samewise"} | ({} if token is None else {"authorization": f"Bearer {token}"})
    try:
        with httpx.Client(follow_redirects=True, timeout=_TIMEOUT, headers=headers) as client:
            yield client
    except UnreachableError:
        raise
    except RefusedError as error:
        raise ModelNotFoundError(_refusal(name, revision, error)) from error
    except TransferError as error:
        raise ModelNotFoundError(f"{name} cannot be downloaded: {error}") from error
    except UnsupportedModelError as error:
        raise ModelNotFoundError(f"{name} cannot be served, and was not downloaded: {error}") from error
    except OSError as error:
        where = error.filename or hub_cache()
        raise ModelNotFoundError(f"{name} cannot be stored in {where}: {error.strerror or error}") from error


def _refusal(name: HubName | FileUrl, revision: str, error: RefusedError) -> str:
    """Why the hub, or the server of a URL, does not give a file, and what to do."""
    if isinstance(name, FileUrl):
        return f"{name.address} cannot be downloaded: {error}; check the address"
    if error.code == "GatedRepo":
        return (
            f"{name} is gated on the hub: accept its terms at {HUB_URL}/{name.repo}, then set --hub-token or "
            "the variable HF_TOKEN to a token of that account"
        )
    if error.code == "RevisionNotFound":
        return f"{name} has no revision {revision} on the hub; its page lists branches and tags"
    if "Invalid credentials" in str(error):
        return f"the hub does not accept the token; set --hub-token or HF_TOKEN to a valid one, or unset it ({error})"
    if error.code == "RepoNotFound" or error.status in (401, 404):
        private = "if it is private, set --hub-token or the variable HF_TOKEN"
        return f"{name} {_NOT_HERE}, and the hub has no such model; {private}"
    return f"{name} {_NOT_HERE}, and its download from the hub failed ({error})"


@dataclass(frozen=True, slots=True)
class RemoteRepo:
    """A repository of the hub at a commit."""

    repo: str
    commit: str
    listing: Listing
    client: httpx.Client

    def url(self, path: str) -> str:
        """Address of a file."""
        return f"{hub_url()}/{self.repo}/resolve/{self.commit}/{quote(path)}"

    def read_json(self, path: str) -> dict[str, Any]:
        """A small file; empty if there is none. Raises TransferError, UnsupportedModelError."""
        return parse_object(get(self.client, self.url(path), path).content, path) if path in self.listing else {}

    def gguf_head(self, path: str) -> GgufFile:
        """The head of a GGUF file. Raises TransferError, UnsupportedModelError."""
        return read_gguf_head(self.client, self.url(path), Path(path))[0]

    def safetensors_head(self, path: str) -> dict[str, Any]:
        """Type and shape of each tensor of a safetensors file. Raises TransferError, UnsupportedModelError."""
        content = get(self.client, self.url(path), path, _FIRST).content
        end = end_of_head(content, path)
        if end > len(content):
            content = get(self.client, self.url(path), path, end).content
        return parse_safetensors_head(content[:end], path)


def look_up(client: httpx.Client, repo: str, revision: str, cache: RepoCache | None = None) -> RemoteRepo:
    """The commit and files of a repository; files of a commit that the cache has listed are not asked for again.

    Raises:
        UnreachableError: if the hub does not answer.
        TransferError: if it refuses, or answers something else.
    """
    if cache is not None and is_commit(revision) and (known := cache.read_listing(revision)) is not None:
        return RemoteRepo(repo, revision, known, client)
    answer = get(client, f"{hub_url()}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true", repo)
    try:
        commit, listing = _read_listing(parse_object(answer.content, "its answer", most=LARGE))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TransferError(f"{hub_url()} does not answer like the hub ({error}); check HF_ENDPOINT") from error
    if cache is not None:
        cache.write_listing(commit, listing)
    return RemoteRepo(repo, commit, listing, client)


def _read_listing(answer: Any) -> tuple[str, Listing]:
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


def read_gguf_head(client: httpx.Client, url: str, path: Path) -> tuple[GgufFile, Answer]:
    """The head of a GGUF file, and the answer that it came with; `path` names the file in errors.

    Raises:
        UnsupportedModelError: if it is not a GGUF file, or is damaged.
        TransferError: if it cannot be read.
    """
    size = _FIRST
    while True:
        answer = get(client, url, path.name, size)
        try:
            return parse_head(answer.content, path), answer
        except IncompleteHeadError:
            if len(answer.content) < size or size >= _LARGEST:
                raise
            size *= 4


def describe_remote(name: HubName | FileUrl, access: HubAccess) -> Description:
    """Describe a model of the hub or of a URL; only the heads of its files are read.

    Raises:
        ModelNotFoundError: if there is no such model, or its server does not answer.
    """
    try:
        if isinstance(name, FileUrl):
            with connected(name) as client:
                return describe_gguf([read_gguf_head(client, url, Path(name.file))[0] for url in urls_of_parts(name)])
        revision = revision_of(name, access)
        with connected(name, revision, access) as client:
            return _describe(name, look_up(client, name.repo, revision))
    except UnreachableError as error:
        message = f"{name} is not on this machine, and its server cannot be reached ({error})"
        raise ModelNotFoundError(message) from error


def _describe(name: HubName, repo: RemoteRepo) -> Description:
    wanted, paths = Wanted(name.tag, name.file), repo.listing.keys()
    if chooses_gguf(paths, wanted):
        files = choose_gguf(paths, wanted, name.repo)
        return describe_gguf([repo.gguf_head(file) for file in files], sum(repo.listing[file].size for file in files))
    files = choose_weights(paths, None, name.repo)
    has_template = any(path in paths for path in ("chat_template.jinja", "chat_template.json"))
    has_template = has_template or bool(repo.read_json("tokenizer_config.json").get("chat_template"))
    heads, config = [repo.safetensors_head(file) for file in files], repo.read_json("config.json")
    size = sum(repo.listing[file].size for file in files)
    with refused("its config.json cannot be read"):
        return describe_safetensors(heads, config, size, has_chat_template=has_template)
