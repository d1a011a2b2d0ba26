"""Checks before a download: the disk has room, memory may suffice, and the model can be read."""

import shutil
from pathlib import Path

from model_runner.gguf.header import GgufFile
from model_runner.hub.access import ModelNotFoundError
from model_runner.hub.progress import size_text

_RESERVE = 1 << 26
"""Bytes of the disk that a download leaves free."""


def check_disk(name: str, folder: Path, num_bytes: int) -> None:
    """Raises ModelNotFoundError if the disk of a folder, which need not exist yet, has no room for so many bytes."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes and num_bytes + _RESERVE > free:
        raise ModelNotFoundError(
            f"{name} needs {size_text(num_bytes)} in {folder}, and {size_text(free)} are free there; free some, or set "
            "HF_HOME (files of URLs: SAMEWISE_CACHE) to a folder on another disk"
        )


def check_memory(name: str, least: int, most: int | None) -> None:
    """Raises ModelNotFoundError if weights need at least `least` bytes of memory, and only `most` can be had."""
    if most is not None and least > most:
        raise ModelNotFoundError(
            f"{name} needs at least {size_text(least)} of memory for its weights alone, and {size_text(most)} are "
            "free; it was not downloaded. Choose a smaller quantization or model, or a machine with more memory"
        )


def check_architecture(file: GgufFile) -> None:
    """Raises UnsupportedModelError if this server cannot read GGUF files of this kind."""
    from model_runner.gguf.architectures import architecture_of  # noqa: PLC0415  (takes a fifth of a second)
    from model_runner.refusal import UnsupportedModelError  # noqa: PLC0415

    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise UnsupportedModelError(f"it holds no model: general.type is {kind}")
    architecture_of(file)
