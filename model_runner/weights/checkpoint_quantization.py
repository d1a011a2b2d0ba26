"""Quantised checkpoints: which are supported, and how they are loaded.

The server reads GPTQ, AWQ, compressed-tensors and MXFP4 itself where it reads the model. Otherwise, if
transformers can dequantise the weights, it does so while loading. They are then packed like the weights of any other
checkpoint, so that rows do not depend on each other. Weights keep transformers' stored form only if the user gives up
exactness.
"""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from model_runner.json_files import read_object
from model_runner.refusal import UnsupportedModelError
from model_runner.weights.quantized_linears import LinearReader, linear_reader
from model_runner.weights.safetensors_head import read_safetensors_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class _Method:
    """Support of transformers for one quantisation method. Packages are given by their import names."""

    name: str
    dequantizes: bool
    """Whether transformers can dequantise the weights."""
    needs: tuple[str, ...] = ()
    """Packages that transformers needs to read them."""
    kernels: tuple[str, ...] | None = None
    """Packages that transformers needs to multiply them in stored form; None if it cannot."""
    reads: bool = False
    """Whether the server reads them itself."""


_MXFP4 = "mxfp4"
"""Only experts of gpt-oss are stored so, and need no reader of linears (`interleaved_experts`)."""
_METHODS: Mapping[str, _Method] = {
    "fp8": _Method("FP8", dequantizes=True, kernels=("kernels",)),
    _MXFP4: _Method("MXFP4", dequantizes=True, kernels=("kernels",), reads=True),
    "compressed-tensors": _Method("compressed-tensors", dequantizes=True, needs=("compressed_tensors",), reads=True),
    "gptq": _Method("GPTQ", dequantizes=False, kernels=("optimum", "gptqmodel"), reads=True),
    "awq": _Method("AWQ", dequantizes=False, kernels=("gptqmodel",), reads=True),
}
logger = logging.getLogger("samewise.runner")

_ANOTHER = "name another checkpoint of the model, such as the unquantised one"


def is_quantized(config: "PretrainedConfig") -> bool:
    """Whether the weights stay quantised when a model is loaded with this configuration."""
    stored = _stored(config)
    return stored is not None and not stored.get("dequantize", False)


def has_plain_tensors(config: "PretrainedConfig") -> bool:
    """Whether a checkpoint's weights are plain numbers, except for experts in MXFP4."""
    stored = _stored(config)
    return stored is None or stored.get("quant_method") == _MXFP4


def native_reader(folder: Path, config: "PretrainedConfig") -> LinearReader | None:
    """The reader of a checkpoint's quantised linears, for models that are not loaded by transformers.

    Returns:
        None if the weights are not quantised, or only transformers can read them.

    Raises:
        UnsupportedModelError: if neither can.
    """
    stored = _stored(config)
    method = None if stored is None else _METHODS.get(str(stored.get("quant_method")))
    if stored is None or method is None or not method.reads or has_plain_tensors(config):
        return None
    try:
        return linear_reader(stored)
    except UnsupportedModelError as error:
        if method.dequantizes:
            logger.info("transformers dequantises the weights of %s: %s", folder, error)
            return None
        raise UnsupportedModelError(f"{folder} has weights that cannot be read: {error}; {_ANOTHER}") from error


def as_served(folder: Path, config: "PretrainedConfig", device: torch.device, *, exact: bool) -> "PretrainedConfig":
    """The configuration to load a checkpoint with; it decides whether quantised weights are dequantised.

    Args:
        folder: the checkpoint's folder.
        config: its configuration.
        device: where the model will run.
        exact: whether a row must not depend on other rows. Only if not, weights are multiplied in stored form.

    Raises:
        UnsupportedModelError: if this is not supported; the message says what to do.
    """
    stored = _stored(config)
    if stored is None:
        _refuse_unread(folder)
        return config
    key = str(stored.get("quant_method"))
    method = _METHODS.get(key)
    if method is None:
        known = ", ".join(sorted(other.name for other in _METHODS.values() if _is_served(other, device, exact)))
        raise UnsupportedModelError(
            f"{folder} has weights quantised by {key}, which is not supported (supported here: {known}); {_ANOTHER}"
        )
    _require(folder, method, method.needs)
    if device.type != "cpu" and not exact and method.kernels is not None:
        if not _missing(method.kernels):
            return config
        if not method.dequantizes:
            _require(folder, method, method.kernels)
    if not method.dequantizes:
        raise UnsupportedModelError(_refusal(folder, method, device))
    if key == "fp8":
        _check_scales(folder, stored.get("weight_block_size"))
    served = deepcopy(config)
    served.quantization_config = {**stored, "dequantize": True}
    return served


def _is_served(method: _Method, device: torch.device, exact: bool) -> bool:
    return method.dequantizes or device.type == "cpu" or not exact


def _refuse_unread(folder: Path) -> None:
    """Raise UnsupportedModelError if only ModelOpt's own file declares a quantisation: transformers ignores it."""
    path = folder / "hf_quant_config.json"
    if not path.is_file():
        return
    try:
        algorithm = read_object(path)["quantization"]["quant_algo"]
    except (ValueError, KeyError, TypeError):
        algorithm = "an algorithm that it does not name"
    if algorithm is not None:
        raise UnsupportedModelError(
            f"{folder} has weights quantised by ModelOpt ({algorithm}, declared only in {path.name}), which is not "
            f"supported; {_ANOTHER}"
        )


def _stored(config: "PretrainedConfig") -> dict[str, Any] | None:
    text: Any = config.get_text_config()
    stored = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    return None if stored is None else dict(stored)


def _missing(packages: Sequence[str]) -> list[str]:
    return [package for package in packages if importlib.util.find_spec(package) is None]


def _require(folder: Path, method: _Method, packages: Sequence[str]) -> None:
    names = [package.replace("_", "-") for package in _missing(packages)]
    if names:
        raise UnsupportedModelError(
            f"{folder} has weights quantised by {method.name}, which needs {' and '.join(names)}; "
            f"run `pip install {' '.join(names)}`"
        )


def _refusal(folder: Path, method: _Method, device: torch.device) -> str:
    if device.type == "cpu":
        return (
            f"{folder} has weights quantised by {method.name}, which the CPU serves only with --quantization int8 or "
            f"int4 and in models of the families that run as one native call; {_ANOTHER}"
        )
    there = f"{folder} has weights quantised by {method.name}, which cannot be dequantised here"
    depend = "and answers from the kernels for them depend on the batch"
    return f"{there}, {depend}; allow that with --no-exact, or {_ANOTHER}"


def _check_scales(folder: Path, block: Sequence[int] | None) -> None:
    """Raise UnsupportedModelError for FP8 weights whose scales transformers would miss or misplace.

    It finds scales by name, and loads weights without scales unchanged. It derives the block size from the number of
    scales, which fails if the last block of a weight is not full.
    """
    shapes: dict[str, list[int]] = {}
    weights: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        head, _ = read_safetensors_head(file)
        shapes |= {name: entry["shape"] for name, entry in head.items()}
        weights |= {name for name, entry in head.items() if entry["dtype"].startswith(("F8_E4M3", "F8_E5M2"))}
    for name in sorted(weights):
        shape = shapes[name]
        stem = name.removesuffix(".weight")
        names = (f"{name}_scale_inv", f"{stem}.scale", f"{stem}.qscale_weight")
        scales = next((shapes[candidate] for candidate in names if candidate in shapes), None)
        if scales is None:
            raise UnsupportedModelError(f"{folder} has FP8 weights whose scales were not found: {name}; {_ANOTHER}")
        if block is not None and not all(map(_is_even, shape[-2:], scales[-2:], block)):
            raise UnsupportedModelError(
                f"{folder} has FP8 weights that are not a multiple of their blocks of {block[0]} x {block[1]}: {name}, "
                f"{shape[-2]} x {shape[-1]}; {_ANOTHER}"
            )


def _is_even(size: int, num_blocks: int, block: int) -> bool:
    return num_blocks == 1 or size == num_blocks * block
