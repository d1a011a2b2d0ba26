"""Models of the hub and of URLs: from the cache if they are complete there, otherwise downloaded.

The HTTP client is imported only for a download.

A start never asks the network for a model that is complete on disk; only HubAccess.updates looks for a newer version.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from model_runner.hub.access import HubAccess, ModelNotFoundError, hub_cache, is_offline
from model_runner.hub.cached import Found, find_cached, find_url
from model_runner.hub.choice import Wanted
from model_runner.hub.names import FileUrl, HubName, revision_of
from model_runner.hub.store import RepoCache

if TYPE_CHECKING:
    from rich.console import Console


def fetch_model(name: HubName, access: HubAccess, console: "Console", *, is_heads: bool = False) -> Found:
    """The files of a model, or of trained heads, of the hub.

    Raises:
        ModelNotFoundError: if there is no such model, it does not fit, or it cannot be downloaded.
    """
    wanted = Wanted(name.tag, name.file, is_heads)
    revision = revision_of(name, access)
    repo = RepoCache(hub_cache(), name.repo)
    updates = access.updates and not is_offline()
    if not updates and (found := find_cached(repo, revision, wanted)) is not None:
        return found
    if is_offline():
        if (found := find_cached(repo, revision, wanted, anyhow=True)) is not None:
            return found
        raise ModelNotFoundError(
            f"{name} is not a folder or GGUF file on this machine, the hub's cache {hub_cache()} does not have all of "
            "it, and HF_HUB_OFFLINE forbids its download; unset it, or give a folder"
        )
    from model_runner.hub.download import download_model  # noqa: PLC0415 - brings the HTTP client
    from model_runner.hub.transfer import UnreachableError  # noqa: PLC0415

    try:
        return download_model(name, revision, wanted, access, console)
    except UnreachableError as error:
        if not updates and (found := find_cached(repo, revision, wanted, anyhow=True)) is not None:
            console.print(f"The hub cannot be reached; using commit {found.commit} on disk.", highlight=False)
            return found
        raise ModelNotFoundError(
            f"{name} is not a folder or GGUF file on this machine, and the hub cannot be reached ({error}); check the "
            "network, or give a folder"
        ) from error


def fetch_url(name: FileUrl, cache: Path, access: HubAccess, console: "Console") -> Found:
    """A GGUF file, with all of its parts, downloaded into a folder of the cache at first use.

    Raises:
        ModelNotFoundError: if it cannot be downloaded, or does not fit.
    """
    if access.revision is not None:
        raise ModelNotFoundError(f"revision {access.revision} applies to models of the hub, not to a URL; leave it out")
    if (not access.updates or is_offline()) and (found := find_url(name, cache)) is not None:
        return Found(found)
    if is_offline():
        raise ModelNotFoundError(f"{name.address} was not downloaded before, and HF_HUB_OFFLINE forbids its download")
    from model_runner.hub.download import download_url  # noqa: PLC0415 - brings the HTTP client
    from model_runner.hub.transfer import UnreachableError  # noqa: PLC0415

    try:
        return download_url(name, cache, access, console)
    except UnreachableError as error:
        raise ModelNotFoundError(
            f"{name.address} cannot be reached: {error}; check the address and the network"
        ) from error
