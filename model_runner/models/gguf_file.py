"""What a GGUF file says before its weights: metadata, and the tensors' names and types. Imports no torch."""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_runner.models.refusal import UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The head of one file."""

    metadata: Mapping[str, Any]
    """Numbers, truth values and texts, and lists of them."""
    tensors: Mapping[str, int]
    """The number of each tensor's block format, by the tensor's name."""

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_gguf(path: Path) -> GgufFile:
    """Read the head of a file.

    Raises:
        UnsupportedModelError: if it is no GGUF file of a version that is known, or ends before its weights begin.
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise UnsupportedModelError("it does not begin as a GGUF file does")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _Reader(content).read()
            except (struct.error, OverflowError, UnicodeDecodeError) as error:
                raise UnsupportedModelError("it is damaged, or ends before its weights begin") from error


class _Reader:
    """Takes one value after the other; what ends too early raises struct.error."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = len(_MAGIC)

    def read(self) -> GgufFile:
        (version,) = self._take("I")
        if version not in _VERSIONS:
            raise UnsupportedModelError(f"it is GGUF version {version}; versions 2 and 3 can be read")
        num_tensors, num_keys = self._take("QQ")
        metadata = {}
        for _ in range(num_keys):
            key = self._text()
            metadata[key] = self._value(*self._take("I"))
        tensors = {}
        for _ in range(num_tensors):
            name = self._text()
            (num_dimensions,) = self._take("I")
            self._take(f"{num_dimensions}Q")
            tensors[name], _ = self._take("IQ")
        return GgufFile(metadata, tensors)

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._take(_NUMBERS[kind])[0]
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise UnsupportedModelError(f"its metadata has a value of the unknown type {kind}")
        element, count = self._take("IQ")
        if element in _NUMBERS:
            return list(self._take(f"{count}{_NUMBERS[element]}"))
        if element != _TEXT:
            raise UnsupportedModelError(f"its metadata has a list of values of the type {element}, which is unknown")
        return [self._text() for _ in range(count)]

    def _text(self) -> str:
        (size,) = self._take("Q")
        (content,) = self._take(f"{size}s")
        return str(content, "utf-8")

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values
