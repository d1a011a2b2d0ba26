"""A checkpoint whose linears are stored quantised, as the model's weights that they stand for."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from torch import Tensor

from model_runner.models.parameters import Blocks, Checkpoint, Matrix
from model_runner.models.quantized_linears import LinearReader, StoredLinear


class QuantizedMatrix:
    """Implements Matrix for a linear that is read as a whole, and kept until its last row is dropped."""

    def __init__(self, shape: tuple[int, int], block_format: int, read: Callable[[], StoredLinear]) -> None:
        self.shape = shape
        self.block_format = block_format
        self._read = read
        self._kept: StoredLinear | None = None

    def stored(self) -> StoredLinear:
        """The blocks. Raises UnsupportedModelError if they cannot be read."""
        if self._kept is None:
            self._kept = self._read()
        return self._kept

    def blocks(self) -> Blocks:
        stored = self.stored()
        order = None if stored.input_order is None else stored.input_order.int()
        return Blocks(stored.block_format, stored.blocks, None, stored.output_scales, order)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.stored().dense(start, stop)

    def drop(self, start: int, stop: int) -> None:
        if stop >= self.shape[0]:
            self._kept = None


class QuantizedCheckpoint:
    """Implements Checkpoint: each quantised linear has one weight, whose values are those that it stands for."""

    def __init__(self, stored: Checkpoint, reader: LinearReader) -> None:
        self._stored = stored
        self._reader = reader
        self._parts: dict[str, dict[str, str]] = {}
        """Stored tensors of each linear, by their parts."""
        self._linears: dict[str, tuple[int, int]] = {}
        for name in stored.shapes:
            linear, _, part = name.rpartition(".")
            if part in reader.parts:
                self._parts.setdefault(linear, {})[part] = name
        for linear, parts in self._parts.items():
            shape = reader.shape(linear, {part: stored.shapes[name] for part, name in parts.items()})
            if shape is not None:
                self._linears[f"{linear}.weight"] = shape

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        hidden = {name for linear in self._linears for name in self._names(linear).values()}
        plain = {name: shape for name, shape in self._stored.shapes.items() if name not in hidden}
        return {**plain, **self._linears}

    def tensor(self, name: str) -> Tensor:
        return self._matrix(name).read() if name in self._linears else self._stored.tensor(name)

    def matrices(self, name: str) -> Sequence[Sequence[Matrix]]:
        return [[self._matrix(name)]] if name in self._linears else self._stored.matrices(name)

    def _names(self, weight: str) -> dict[str, str]:
        return self._parts[weight.removesuffix(".weight")]

    def _matrix(self, weight: str) -> QuantizedMatrix:
        linear = weight.removesuffix(".weight")

        def read() -> StoredLinear:
            tensors = {part: self._stored.tensor(name) for part, name in self._names(weight).items()}
            return self._reader.read(linear, tensors)

        return QuantizedMatrix(self._linears[weight], self._reader.block_format(linear), read)
