"""Folders with draft heads: config.json, and weights as safetensors or torch's .pt or .bin, in any floating type.

This project adds two extensions, which it reads in any file. `d2t`, EAGLE-3's table of a reduced draft vocabulary,
works for every kind of heads. Weights may be int8: `X.weight` and `X.weight_scale` [outputs] float32 mean weight *
scale.
"""

import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model_runner.heads.base import HeadsError, TargetShape, from_offsets
from model_runner.json_files import read_object
from model_runner.refusal import UnsupportedModelError
from model_runner.weights.size_check import check_sizes

SCALE = "_scale"
"""Suffix of the scales of an int8 weight."""
_BLOCK_SCALE = "_scale_inv"
"""Suffix of the scales of a float8 weight."""
_BLOCK = (128, 128)
"""Outputs and inputs of a block with one scale, if the configuration does not name others."""


class HeadsCheckpoint:
    """Configuration and weights of heads. Every tensor that is taken is checked; all errors are HeadsError."""

    def __init__(self, origin: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """`origin` names the heads in error messages."""
        self.config = config
        self._origin = origin
        self._tensors = tensors
        self._taken: set[str] = set()

    @classmethod
    def read(cls, folder: Path, prefix: str = "") -> "HeadsCheckpoint":
        """Read a folder, with the tensors whose names begin with `prefix`. Raises HeadsError."""
        checkpoint = cls(f"the heads in {folder}", read_config(folder), _read_tensors(folder, prefix))
        shapes = [tensor.shape for tensor in checkpoint._tensors.values()]
        try:
            check_sizes(checkpoint.config, shapes, "config.json")
        except UnsupportedModelError as error:
            raise checkpoint.error(str(error)) from error
        return checkpoint

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._tensors)

    @property
    def left(self) -> frozenset[str]:
        """Names of the tensors that were not taken."""
        return self.names - self._taken

    def error(self, problem: str) -> HeadsError:
        """The error for a problem with these heads, for the caller to raise."""
        return HeadsError(f"{self._origin} cannot be used: {problem}")

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of these entries of config.json that is present."""
        value = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if not isinstance(value, int) or value < 0:
            raise self.error(f"{' or '.join(names)} in config.json is {value!r}, not a number")
        return value

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor as float32; its shape must be `shape`."""
        if name not in self._tensors:
            raise self.error(f"the tensor {name} is missing")
        self._taken.add(name)
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise self.error(f"{name} has the shape {tuple(tensor.shape)} instead of {shape}")
        if tensor.dtype != torch.int8:
            if not tensor.is_floating_point():
                raise self.error(f"{name} holds {tensor.dtype}, not floats")
            return tensor.float() if tensor.element_size() > 1 else self._from_float8(name, tensor)
        return tensor.float() * self.take(name + SCALE, shape[0]).unsqueeze(1)

    def _from_float8(self, name: str, tensor: Tensor) -> Tensor:
        """Multiply with the scale of all weights, or of blocks of outputs and inputs, as DeepSeek-V3 stores them."""
        scale = name + _BLOCK_SCALE
        if scale not in self._tensors:
            raise self.error(f"{name} is stored in float8 without {scale}, which is not supported")
        if self._tensors[scale].numel() == 1:
            return tensor.float() * self.take(scale, *self._tensors[scale].shape)
        sizes = (self.config.get("quantization_config") or {}).get("weight_block_size") or _BLOCK
        *outer, outputs, inputs = tensor.shape
        scales = self.take(scale, *outer, -(-outputs // sizes[0]), -(-inputs // sizes[1]))
        for dim, size in zip((-2, -1), sizes, strict=True):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, tensor.shape[dim])
        return tensor.float() * scales

    def fill(self, heads: nn.Module, renamed: Mapping[str, str] | None = None, optional: Collection[str] = ()) -> None:
        """Load all parameters of the heads by name; `renamed` maps prefixes of parameters to prefixes in the file.

        Parameters in `optional` keep their values if the file lacks them.
        """
        tensors = {}
        for name, value in heads.state_dict().items():
            prefix = next((prefix for prefix in renamed or {} if name.startswith(prefix)), "")
            published = (renamed or {}).get(prefix, "") + name.removeprefix(prefix)
            missing = name in optional and published not in self._tensors
            tensors[name] = value if missing else self.take(published, *value.shape)
        heads.load_state_dict(tensors, assign=True)
        heads.requires_grad_(requires_grad=False).eval()

    def rows(self, name: str) -> int:
        """The first dimension of a tensor."""
        if name not in self._tensors or not self._tensors[name].dim():
            raise self.error(f"the tensor {name} is missing")
        return self._tensors[name].shape[0]

    def draft_ids(self, target: TargetShape) -> Tensor | None:
        """The value of Heads.draft_ids, from `d2t`."""
        if "d2t" not in self._tensors:
            return None
        ids = from_offsets(self._tensors["d2t"])
        if ids.dim() != 1 or not len(ids) or ids.min() < 0 or ids.max() >= target.vocab_size:
            raise self.error(f"d2t names tokens outside the target's vocabulary of {target.vocab_size:,}")
        return ids

    def check_hidden(self, hidden: int, target: TargetShape) -> None:
        """Raise HeadsError if the heads were trained for a target of another hidden size."""
        if hidden != target.hidden:
            raise self.error(f"they were trained for a hidden size of {hidden:,}, but the model's is {target.hidden:,}")


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises HeadsError unless it is a JSON object."""
    try:
        return read_object(folder / "config.json")
    except OSError as error:
        raise HeadsError(f"the heads in {folder} cannot be used: config.json: {error.strerror}") from error
    except UnsupportedModelError as error:
        raise HeadsError(f"the heads cannot be used: {error}") from error


def _read_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The weights whose names begin with the prefix, from safetensors files or else from torch's."""
    files = sorted(folder.glob("*.safetensors")) or sorted([*folder.glob("*.pt"), *folder.glob("*.bin")])
    if not files:
        raise HeadsError(f"the heads in {folder} cannot be used: there is no .safetensors, .pt or .bin file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= _read_safetensors(file, prefix) if file.suffix == ".safetensors" else _read_torch(file, prefix)
        except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise HeadsError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    return tensors


def _read_safetensors(file: Path, prefix: str) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as reader:
        return {name: reader.get_tensor(name) for name in reader.keys() if name.startswith(prefix)}  # noqa: SIM118


def _read_torch(file: Path, prefix: str) -> dict[str, Tensor]:
    """Load a torch file without executing code from it."""
    content = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise HeadsError(f"{file} does not hold named tensors")
    return {name: tensor for name, tensor in content.items() if name.startswith(prefix)}
