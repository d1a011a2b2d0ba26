"""Which files of a repository, or of a folder, make a model.

The choice of a GGUF file follows llama.cpp's rule (common/download.cpp), so that the same name gives the same file.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from model_runner.gguf.header import parts_of
from model_runner.hub.access import ModelNotFoundError
from model_runner.refusal import UnsupportedModelError
from model_runner.weights.safetensors_head import INDEX, SINGLE, shards_of

WEIGHTS = (".safetensors", ".gguf")
"""Endings of files with weights."""
PREFERRED = ("Q4_K_M", "Q8_0")
"""Tags that are taken if none is named, in this order; then the first file."""
_NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_SMALL_IN_FOLDERS = (
    *("[0-9]_*/config.json", "[0-9]_Dense/model.safetensors", "[0-9]_LayerNorm/model.safetensors"),
    "additional_chat_templates/*.jinja",
)
"""Sentence-transformers' modules, and named chat templates."""
HEADS = ("*.json", "*.safetensors", "*.bin", "*.pt")
"""Files of trained heads."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which model of a repository is meant."""

    tag: str | None = None
    file: str | None = None
    is_heads: bool = False
    """Trained heads for speculation instead of a model."""

    @property
    def names_gguf(self) -> bool:
        return self.tag is not None or self.file is not None


def chooses_gguf(paths: Collection[str], wanted: Wanted) -> bool:
    """Whether a GGUF file is chosen: if one is named, or if there are no safetensors."""
    return not wanted.is_heads and (wanted.names_gguf or not any(map(_is_safetensors, paths)))


def choose_gguf(paths: Collection[str], wanted: Wanted, where: str) -> list[str]:
    """All parts of the chosen GGUF file, in order.

    Args:
        paths: the files of a repository or folder.
        wanted: the tag or file that is named, if any.
        where: the repository's or folder's name, for errors.

    Raises:
        ModelNotFoundError: if there is no such file, or one of its parts is missing; it lists what is there.
    """
    files = [path for path in sorted(paths) if _is_model(path)]
    if not files:
        raise ModelNotFoundError(f"{where} has neither safetensors nor GGUF files; {_listed(paths)}")
    if wanted.file is not None:
        found = wanted.file if wanted.file in paths else None
    else:
        found = _matching(files, (wanted.tag,)) if wanted.tag else (_matching(files, PREFERRED) or files[0])
    if found is None:
        asked = wanted.file or f"GGUF file for {wanted.tag}"
        raise ModelNotFoundError(f"{where} has no {asked}; it has {', '.join(_firsts(files))}")
    parts = [part.as_posix() for part in parts_of(Path(found))]
    if missing := [part for part in parts if part not in paths]:
        raise ModelNotFoundError(f"{where} has not all {len(parts)} parts of {found}: {missing[0]} is missing")
    return parts


def choose_small(paths: Iterable[str], wanted: Wanted) -> list[str]:
    """Configuration, tokenizer, chat templates and index; of trained heads all files."""
    if wanted.is_heads:
        return [path for path in paths if "/" not in path and _matches(path, HEADS)]
    return [
        path
        for path in paths
        if (_matches(path, _SMALL_FILES) if "/" not in path else _matches(path, _SMALL_IN_FOLDERS))
    ]


def choose_weights(paths: Collection[str], index: Path | None, where: str) -> list[str]:
    """The safetensors that transformers reads: one file, the shards of the index, or all but Mistral's own copy.

    Args:
        paths: the files of the repository.
        index: its file model.safetensors.index.json on disk, if it has one.
        where: the repository's name, for errors.

    Raises:
        ModelNotFoundError: if the index is damaged, or names a file that is not there.
    """
    if SINGLE in paths:
        return [SINGLE]
    if index is None:
        files = [path for path in paths if "/" not in path and _is_safetensors(path)]
        return [file for file in files if not file.startswith("consolidated")] or files
    try:
        shards = shards_of(index)
    except (OSError, UnsupportedModelError) as error:
        raise ModelNotFoundError(str(error)) from None
    if missing := sorted(set(shards) - set(paths)):
        raise ModelNotFoundError(f"{where} has no file {missing[0][:200]!r}, which its {INDEX} names")
    return shards


def _is_safetensors(path: str) -> bool:
    return "/" not in path and path.endswith(".safetensors")


def _is_model(path: str) -> bool:
    name = PurePosixPath(path).name.lower()
    return name.endswith(".gguf") and not any(word in name for word in _NO_MODELS)


def _matching(files: Iterable[str], tags: Iterable[str]) -> str | None:
    """The first file with the first tag that any has, as a whole word if possible: F16 is not BF16."""
    firsts = _firsts(files)
    for tag in tags:
        exact = [file for file in firsts if PurePosixPath(file).name.lower() == tag.lower()]
        for word in (rf"(?<![a-z0-9]){re.escape(tag)}[.-]", rf"{re.escape(tag)}[.-]"):
            exact += [file for file in firsts if re.search(word, file, re.IGNORECASE)]
        if exact:
            return exact[0]
    return None


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _firsts(files: Iterable[str]) -> list[str]:
    """The files that are whole, or the first of several parts."""
    return [file for file in files if parts_of(Path(file))[0].as_posix() == file]


def _listed(paths: Collection[str]) -> str:
    weights = [path for path in sorted(paths) if path.endswith((".bin", ".pt", ".pth", ".safetensors", ".gguf"))]
    return f"it has {', '.join(weights[:10])}" if weights else "it has no weights"
