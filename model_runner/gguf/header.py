"""The head of a GGUF file: its metadata and the table of its tensors, over all parts of a split file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Nothing here imports torch, transformers or gguf.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from model_runner.refusal import UnsupportedModelError, few
from model_runner.weights.damage import is_lfs_pointer

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Numpy and struct have the same letters for them."""
_TEXT, _ARRAY = 8, 9
_SIZE = struct.Struct("<Q")
_MAX_DIMENSIONS = 4
_MOST_KEYS, _MOST_TENSORS, _MOST_TEXTS = 1 << 14, 1 << 18, 1 << 22
"""Entries of a head, of which each takes more memory than it has bytes.
The largest vocabularies have 262,144 tokens, and 600,000 merges."""
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is stored, and how."""

    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it; the file stores the reverse."""
    block_format: int
    """The number of ggml's type."""
    file: Path
    offset: int
    """Bytes from the beginning of the file."""

    @property
    def size(self) -> int:
        """How many weights there are."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model in one file, or in several parts."""

    metadata: Mapping[str, Any]
    """Numbers, truth values and texts, lists of texts, and arrays of numbers; of a split file, from its first part."""
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def parts_of(path: Path) -> list[Path]:
    """All parts of the model that a file is a part of, in order, by the names that llama.cpp gives them."""
    name = _PART.fullmatch(path.name)
    if name is None:
        return [path]
    count = int(name["count"])
    names = (f"{name['stem']}-{number:05}-of-{count:05}{name['suffix']}" for number in range(1, count + 1))
    return [path.with_name(part) for part in names]


def is_gguf(path: Path) -> bool:
    """Whether a file begins like a GGUF file, whatever its name is. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_gguf(path: Path, *, has_texts: bool = True) -> GgufFile:
    """Read the head of a file, and of all other parts if it is one of several.

    Args:
        path: the file, or one of its parts.
        has_texts: whether lists of texts are read. They are the vocabulary, which takes longer than all else.

    Raises:
        UnsupportedModelError: if it is not a GGUF file of a known version, is damaged, or lacks a part.
        OSError: if it cannot be read.
    """
    parts = parts_of(path)
    if missing := [part.name for part in parts if not part.is_file()]:
        raise UnsupportedModelError(f"it is one of {len(parts)} parts, and {few(missing)} is missing beside it")
    files = [_read_part(part, has_texts=has_texts) for part in parts]
    first = files[0]
    count = first.metadata.get("split.count", 0) or 1
    if count != len(parts):
        raise UnsupportedModelError(
            f"it is split into {count} parts, and its name says {len(parts)}: name the parts as llama.cpp does, "
            "NAME-00001-of-00003.gguf, or merge them with `llama-gguf-split --merge`"
        )
    tensors: dict[str, GgufTensor] = {}
    for number, (part, file) in enumerate(zip(parts, files, strict=True)):
        if file.metadata.get("split.no", 0) != number:
            raise UnsupportedModelError(f"{part.name} says that it is part {file.metadata.get('split.no', 0) + 1}")
        if twice := tensors.keys() & file.tensors.keys():
            raise UnsupportedModelError(f"{part.name} repeats tensors of another part: {few(twice)}")
        tensors |= file.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise UnsupportedModelError(f"its parts have {len(tensors)} tensors together, and should have {expected}")
    return GgufFile(first.metadata, tensors)


class IncompleteHeadError(UnsupportedModelError):
    """The content ends before the head does."""


def parse_head(content: bytes | mmap.mmap, path: Path, *, has_texts: bool = True) -> GgufFile:
    """Read the head of one file from its first bytes.

    Args:
        content: the whole file, or at least its head.
        path: the file, for errors and for its tensors.
        has_texts: as for `read_gguf`.

    Raises:
        IncompleteHeadError: if the content ends before the head does, or is damaged.
        UnsupportedModelError: if it is not a GGUF file of a known version, or is damaged.
    """
    if content[: len(_MAGIC)] != _MAGIC:
        raise UnsupportedModelError(f"{path.name} is not a GGUF file; download it again")
    try:
        return _HeaderReader(content, path, has_texts=has_texts).read()
    except (struct.error, OverflowError, MemoryError, UnicodeDecodeError) as error:
        raise IncompleteHeadError(
            f"{path.name} is damaged or incomplete: it ends before its weights begin; download it again"
        ) from error


def _read_part(path: Path, *, has_texts: bool) -> GgufFile:
    with path.open("rb") as file:
        if is_lfs_pointer(path):
            raise UnsupportedModelError(
                f"{path.name} is a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}"
            )
        if not file.read(1):
            raise UnsupportedModelError(f"{path.name} is not a GGUF file; download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return parse_head(content, path, has_texts=has_texts)


class _HeaderReader:
    """Reads one value after the other; raises struct.error where the file ends too early."""

    def __init__(self, content: bytes | mmap.mmap, path: Path, *, has_texts: bool) -> None:
        self._content = content
        self._path = path
        self._has_texts = has_texts
        self._at = len(_MAGIC)

    def read(self) -> GgufFile:
        (version,) = self._take("I")
        if version not in _VERSIONS:
            raise UnsupportedModelError(f"it is GGUF version {version}; versions 2 and 3 can be read")
        num_tensors, num_keys = self._take("QQ")
        self._check_count("tensors", num_tensors, _MOST_TENSORS)
        self._check_count("keys in its metadata", num_keys, _MOST_KEYS)
        metadata = {}
        for _ in range(num_keys):
            key = self._text()
            metadata[key] = self._value(*self._take("I"))
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise UnsupportedModelError(f"its general.alignment is {alignment}; a positive number of bytes is needed")
        data = -(-self._at // alignment) * alignment
        tensors = {
            name: GgufTensor(shape, block_format, self._path, data + offset)
            for name, shape, block_format, offset in entries
        }
        if len(tensors) != len(entries):
            raise UnsupportedModelError("two of its tensors have the same name")
        return GgufFile(metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, block format, and offset from the beginning of the weights."""
        name = self._text()
        (num_dimensions,) = self._take("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise UnsupportedModelError(f"its tensor {name[:80]} has {num_dimensions} dimensions")
        shape: Sequence[int] = self._take(f"{num_dimensions}Q")
        block_format, offset = self._take("IQ")
        return name, tuple(reversed(shape)), block_format, offset

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._take(_NUMBERS[kind])[0]
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise UnsupportedModelError(f"its metadata has a value of the unknown type {kind}")
        element, count = self._take("IQ")
        if element in _NUMBERS:
            return self._numbers(count, np.dtype(_NUMBERS[element]).newbyteorder("<"))
        if element != _TEXT:
            raise UnsupportedModelError(f"its metadata has a list of values of the unknown type {element}")
        self._check_count("texts in a list", count, _MOST_TEXTS)
        return self._texts(count)

    def _check_count(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise UnsupportedModelError(f"it is damaged: it has {count:,} {what}; download it again")

    def _numbers(self, count: int, dtype: "np.dtype[Any]") -> npt.NDArray[Any]:
        if count * dtype.itemsize > len(self._content) - self._at:
            raise struct.error("numbers are cut off")
        numbers = np.frombuffer(self._content, dtype, count, self._at).copy()
        self._at += numbers.nbytes
        return numbers

    def _texts(self, count: int) -> list[str]:
        """Like `_text` so many times, but faster: there may be half a million tokens and merges."""
        content, end, at, texts = self._content, len(self._content), self._at, []
        for _ in range(count):
            begin = at + _SIZE.size
            at = begin + _SIZE.unpack_from(content, at)[0]
            if at > end:
                raise struct.error("a text is cut off")
            if self._has_texts:
                texts.append(str(content[begin:at], "utf-8"))
        self._at = at
        return texts

    def _text(self) -> str:
        (size,) = self._take("Q")
        (content,) = self._take(f"{size}s")
        return str(content, "utf-8")

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values
