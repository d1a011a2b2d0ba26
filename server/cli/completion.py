"""Shell completion of values: choices, models in the hub's cache, folders and GGUF files. Imports nothing heavy."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from model_runner.hub.access import hub_cache

_CACHED = "models--"
"""Start of a model's folder in the hub's cache, as in models--Qwen--Qwen3-0.6B."""


def completes(choices: Sequence[object]) -> Callable[[str], list[str]]:
    """A function for typer that completes one of these values."""

    def complete(incomplete: str) -> list[str]:
        return [str(choice) for choice in choices if str(choice).startswith(incomplete)]

    return complete


def complete_model(incomplete: str) -> list[str]:
    """Models in the hub's cache, and folders and GGUF files on this machine, whose names begin like this."""
    return [name for name in (*_cached_models(), *_local_models(incomplete)) if name.startswith(incomplete)]


def _cached_models() -> Iterator[str]:
    for folder in sorted(hub_cache().glob(f"{_CACHED}*")):
        yield folder.name.removeprefix(_CACHED).replace("--", "/")


def _local_models(incomplete: str) -> Iterator[str]:
    """Entries of the folder that is being typed, spelled as it is: folders with a slash at the end."""
    typed, _, begun = incomplete.rpartition("/")
    parent = f"{typed}/" if "/" in incomplete else ""
    folder = Path(parent or ".").expanduser()
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(begun) or (path.name.startswith(".") and not begun):
            continue
        if path.is_dir():
            yield f"{parent}{path.name}/"
        elif path.suffix.lower() == ".gguf":
            yield f"{parent}{path.name}"
