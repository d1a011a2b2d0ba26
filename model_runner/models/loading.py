"""From a folder to a model that is ready to run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from model_runner.config import Quantization
from model_runner.kernels.library import Kernels
from model_runner.models.activations import replace_activations
from model_runner.models.experts import EXPERTS_NAME, pack_experts, register_experts
from model_runner.models.fused import fuse_layers
from model_runner.models.hf_attention import ATTENTION_NAME, register_attention
from model_runner.models.inspection import UnsupportedModelError
from model_runner.models.int8 import Int8Product
from model_runner.models.onednn import OneDNNPacker
from model_runner.models.packed import Packer, pack_weights

logger = logging.getLogger("samewise.runner")


def resolve_device(device: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda".

    Raises:
        ValueError: if CUDA is asked for and not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch finds no CUDA device")
    return torch.device(device)


def resolve_dtype(dtype: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """The type of weights and KV cache.

    Raises:
        ValueError: for a type that the device cannot run exactly.
    """
    if device.type == "cpu":
        if dtype not in ("auto", "float32"):
            raise ValueError(f"dtype {dtype} is not supported on CPU; use float32 or auto")
        return torch.float32
    name = config.dtype or "bfloat16" if dtype == "auto" else dtype
    resolved: torch.dtype = getattr(torch, str(name).removeprefix("torch."))
    return resolved


def resolve_quantization(quantization: Quantization, device: torch.device, kernels: Kernels | None) -> bool:
    """Whether products run in int8.

    Raises:
        ValueError: if int8 is asked for where it cannot be had.
    """
    if quantization == "int8" and device.type != "cpu":
        raise ValueError(f"quantization int8 is for the CPU; use none or auto on {device.type}")
    if quantization == "int8" and kernels is None:
        raise ValueError("quantization int8 needs the native kernels, which this machine cannot build (see above)")
    return quantization != "none" and kernels is not None


def load_config(folder: Path) -> PretrainedConfig:
    """Read config.json.

    Raises:
        UnsupportedModelError: if transformers does not know the architecture.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{folder} holds no model that transformers can read: {error}") from error
    return config


def load_model(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, int8: Kernels | None
) -> PreTrainedModel:
    """Load the weights and prepare them for exact products on the device.

    Args:
        folder: of the model.
        config: its configuration.
        dtype: what the weights are loaded as.
        device: where they go.
        int8: the kernels that shall multiply in int8; None leaves the weights in dtype.

    Raises:
        UnsupportedModelError: if a part of the model has no exact counterpart.
    """
    register_attention()
    register_experts()
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=EXPERTS_NAME if device.type == "cpu" else None,
        )
    prepare(model, device, int8)
    result: PreTrainedModel = model
    return result


def prepare(model: nn.Module, device: torch.device, int8: Kernels | None) -> None:
    """Move the model to the device; on CPU make its results independent of the batch.

    Raises:
        UnsupportedModelError: if a part of the model has no exact counterpart.
    """
    model.eval().requires_grad_(requires_grad=False)
    if device.type != "cpu":
        model.to(device)
        return
    onednn = OneDNNPacker()
    pack: Packer = onednn
    if int8 is not None:
        pack = partial(Int8Product, kernels=int8)
        logger.info("layers     %d as one native operator each", fuse_layers(model, int8))
    try:
        replace_activations(model)
        pack_experts(model, pack)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    pack_weights(model, pack, onednn)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own progress bars."""
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
