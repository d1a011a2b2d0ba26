"""The metadata of a GGUF file that describe its model. Every key must be read: an unread one would be ignored."""

from typing import Any

import numpy as np

from model_runner.gguf.header import GgufFile
from model_runner.read_numbers import whole_number
from model_runner.refusal import UnsupportedModelError, few

Config = dict[str, Any]
"""The content of a config.json, as transformers reads it."""

_MEANINGLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type"}
"""Keys without a meaning for generation; the vocabulary has as many tokens as the embedding has rows."""


_MOST_LAYERS = 1 << 16


def is_layer(text: str) -> bool:
    """Whether a part of a tensor's name is the number of a layer."""
    return len(text) <= len(str(_MOST_LAYERS)) and whole_number(text) is not None


def _plain(key: str, value: Any) -> Any:
    """A value, or the numbers of each layer as a list."""
    if not isinstance(value, np.ndarray):
        return value
    if len(value) > _MOST_LAYERS:
        raise UnsupportedModelError(f"its {key} has {len(value):,} numbers, which is more than layers can be")
    return value.tolist()


class Metadata:
    """The keys of a file's architecture, of which it is known which were read."""

    def __init__(self, file: GgufFile) -> None:
        self._prefix = f"{file.architecture}."
        self.values = {
            key.removeprefix(self._prefix): _plain(key, value)
            for key, value in file.metadata.items()
            if key.startswith(self._prefix)
        }
        """Values by key without the architecture's name; lists have a number for each layer."""
        self._read = set(_MEANINGLESS)
        self._shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        self._layers: dict[str, set[int]] = {}
        for block, layer, name in (name.split(".", 2) for name in file.tensors if name.count(".") > 1):
            if block == "blk" and is_layer(layer):
                self._layers.setdefault(name, set()).add(int(layer))

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or what llama.cpp takes where it is missing."""
        self._read.add(key)
        return self.values.get(key, default)

    def has_tensor(self, name: str) -> bool:
        """Whether some layer has a tensor of this name, such as "attn_q.bias"."""
        return name in self._layers

    def layers_with_tensor(self, name: str) -> set[int]:
        """The layers that have a tensor of this name."""
        return self._layers.get(name, set())

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in the first layer that has it. Raises UnsupportedModelError if none has."""
        if not self.has_tensor(name):
            raise UnsupportedModelError(f"none of its layers has the tensor {name}")
        return self._shapes[f"blk.{min(self._layers[name])}.{name}"]

    def was_read(self, key: str) -> bool:
        """Whether something was made of a key."""
        return key in self._read

    def require(self, key: str, *, some_layers: bool = False) -> Any:
        """A positive number, or one for each layer, of which some may be 0 if `some_layers`.

        Raises:
            UnsupportedModelError: if it is missing or something else.
        """
        value = self.get(key)
        if value is None:
            raise UnsupportedModelError(f"its metadata lack {self._prefix}{key}")
        for number in value if isinstance(value, list) and value else [value]:
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or number < 0 or (number == 0 and not (some_layers and isinstance(value, list))):
                raise UnsupportedModelError(f"its {self._prefix}{key} is {number!r}; a positive number is needed")
        return value

    def same_in_layers(self, key: str, default: Any = None, *, some_layers: bool = False) -> Any:
        """The value of a key that may have one for each layer; if `some_layers`, without layers where it is 0.

        Raises:
            UnsupportedModelError: if layers differ.
        """
        value = self.get(key, default)
        if not isinstance(value, list):
            return value
        values = {number for number in value if number or not some_layers}
        if len(values) != 1:
            raise UnsupportedModelError(f"its layers differ in {self._prefix}{key}: {value[:8]} ...")
        return values.pop()

    def layers_with(self, key: str, layers: int) -> list[bool]:
        """Whether each of the layers has a number other than 0 in the value of a key.

        Raises:
            UnsupportedModelError: if there are fewer numbers than layers.
        """
        value = self.require(key, some_layers=True)
        return [bool(number) for number in self.of_layers(key, value, layers)]

    def of_layers(self, key: str, value: Any, layers: int) -> list[Any]:
        """One value for each of the layers, of a list of at least as many, or of one value that all layers have."""
        if isinstance(value, list) and len(value) < layers:
            raise UnsupportedModelError(f"its {self._prefix}{key} has {len(value)} entries for {layers} layers")
        return value[:layers] if isinstance(value, list) else [value] * layers

    def expect(self, key: str, value: Any) -> None:
        """Raises UnsupportedModelError if a key has another value; it may be missing."""
        found = self.get(key, value)
        if found != value:
            raise UnsupportedModelError(f"its {self._prefix}{key} is {found}; only {value} is supported")

    def check_all_read(self) -> None:
        """Raises UnsupportedModelError if there are keys that nothing was made of."""
        if unread := {self._prefix + key for key in self.values.keys() - self._read}:
            raise UnsupportedModelError(
                f"its metadata have keys that this server does not know for a {self._prefix[:-1]} model: {few(unread)}"
            )
