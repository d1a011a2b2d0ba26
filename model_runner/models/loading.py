"""From a folder to a model that is ready to run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from model_runner.config import Quantization
from model_runner.kernels.library import Kernels, WeightKind
from model_runner.models.activations import replace_activations
from model_runner.models.experts import EXPERTS_NAME, pack_experts, register_experts
from model_runner.models.fused import fuse_layers
from model_runner.models.hf_attention import ATTENTION_NAME, register_attention
from model_runner.models.inspection import UnsupportedModelError
from model_runner.models.native import NativePacker
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


def resolve_quantization(
    quantization: Quantization, device: torch.device, kernels: Kernels | None
) -> WeightKind | None:
    """What weights are packed as; None leaves them as the model computes.

    Raises:
        ValueError: if int8 or int4 is asked for where it cannot be had.
    """
    if quantization == "none":
        return None
    if quantization == "auto":
        return None if kernels is None else "int8"
    if device.type != "cpu":
        raise ValueError(f"quantization {quantization} is for the CPU; use none or auto on {device.type}")
    if quantization == "fp8":
        raise ValueError("quantization fp8 is for CUDA; use int8, int4, none or auto on cpu")
    if kernels is None:
        raise ValueError(
            f"quantization {quantization} needs the native kernels, which this machine cannot build (see above)"
        )
    return quantization


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


def check_tokenizers(model: Path, other: Path, role: str) -> None:
    """Raises ValueError unless two models' folders hold the same vocabulary; `role` is what the other one is for."""
    if _vocabulary(model) != _vocabulary(other):
        raise ValueError(f"the {role} model {other} has another vocabulary than {model}; it cannot speak of its tokens")


def _vocabulary(folder: Path) -> dict[str, int] | None:
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)).get_vocab() if path.exists() else None


def load_model(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, packer: NativePacker | None
) -> PreTrainedModel:
    """Load the weights and prepare them for exact products on the device.

    Args:
        folder: of the model.
        config: its configuration.
        dtype: what the weights are loaded as.
        device: where they go.
        packer: packs the weights for the native kernels; None leaves them in dtype.

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
    prepare(model, device, packer)
    result: PreTrainedModel = model
    return result


def prepare(model: PreTrainedModel, device: torch.device, packer: NativePacker | None) -> None:
    """Move the model to the device; on CPU make its results independent of the batch.

    The head stays in int8 beside other weights in int4: its error goes into every logit.

    Raises:
        UnsupportedModelError: if a part of the model has no exact counterpart.
    """
    model.eval().requires_grad_(requires_grad=False)  # type: ignore[no-untyped-call]
    if device.type != "cpu":
        model.to(device)  # type: ignore[arg-type]
        return
    onednn = OneDNNPacker()
    if packer is not None:
        logger.info("layers     %d as one native operator each", fuse_layers(model, packer))
        if (head := model.get_output_embeddings()) is not None:  # type: ignore[no-untyped-call]
            pack_weights(head, replace(packer, kind="int8"), onednn)
    pack: Packer = packer or onednn
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
