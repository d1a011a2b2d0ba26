"""GGUF files of URLs outside of the hub: from the cache folder, otherwise downloaded into it.

The HTTP client is imported only for a download.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from model_runner.gguf.header import parts_of
from model_runner.hub.access import HubAccess, ModelNotFoundError, is_offline
from model_runner.hub.cached import Found
from model_runner.hub.names import FileUrl

if TYPE_CHECKING:
    from rich.console import Console

FOLDER = "downloads"
SOURCE = "source.json"
"""File with the address and the version, in the folder of each download."""


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
    from model_runner.hub.refusals import refusals_named  # noqa: PLC0415 - brings the HTTP client
    from model_runner.hub.remote_repo import open_client  # noqa: PLC0415
    from model_runner.hub.transfer import UnreachableError  # noqa: PLC0415
    from model_runner.hub.url_download import download_url  # noqa: PLC0415

    try:
        with refusals_named(name), open_client() as client:
            return download_url(name, urls_of_parts(name), _targets(name, cache), access, console, client)
    except UnreachableError as error:
        raise ModelNotFoundError(
            f"{name.address} cannot be reached: {error}; check the address and the network"
        ) from error


def find_url(name: FileUrl, cache: Path) -> Path | None:
    """The file, or the first of its parts, if it was downloaded into the cache before."""
    targets = _targets(name, cache)
    return targets[0] if targets[0].with_name(SOURCE).is_file() and all(map(Path.is_file, targets)) else None


def urls_of_parts(name: FileUrl) -> list[str]:
    """Addresses of all parts of a file."""
    url = urlsplit(name.url)
    folder = url.path.rpartition("/")[0]
    return [url._replace(path=f"{folder}/{quote(part.name)}").geturl() for part in parts_of(Path(name.file))]


def folder_of(name: FileUrl, cache: Path) -> Path:
    """The folder of the cache for a file and its other parts."""
    first = f"{name.address.rpartition('/')[0]}/{quote(parts_of(Path(name.file))[0].name)}"
    return cache / FOLDER / hashlib.sha256(first.encode()).hexdigest()[:16]


def _targets(name: FileUrl, cache: Path) -> list[Path]:
    return [folder_of(name, cache) / part.name for part in parts_of(Path(name.file))]
