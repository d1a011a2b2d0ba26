"""Loads draft heads of any kind from a folder."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model_runner.heads.base import Heads, TargetShape
from model_runner.heads.checkpoint import SCALE, HeadsCheckpoint, read_config
from model_runner.heads.eagle3 import Eagle3Heads, eagle3_checkpoint, load_eagle3
from model_runner.heads.hydra import HydraHeads, hydra_checkpoint, load_hydra
from model_runner.heads.medusa import MedusaHeads, load_medusa, medusa_checkpoint
from model_runner.heads.mtp import has_mtp, load_mtp

_LOADERS: dict[str, Callable[[HeadsCheckpoint, TargetShape], Heads]] = {
    "medusa": load_medusa,
    "hydra": load_hydra,
    "eagle3": load_eagle3,
}


def load_heads(folder: Path, target: TargetShape) -> Heads:
    """Read a checkpoint of Medusa, Hydra or EAGLE-3 heads, or the MTP module of a target's checkpoint.

    Weights are float32 on the CPU; the heads are in evaluation mode without gradients.

    Raises:
        HeadsError: if the kind is not known, the heads do not fit the target, or the files are damaged.
    """
    config = read_config(folder)
    if has_mtp(config):
        return load_mtp(folder, config, target)
    return heads_of(HeadsCheckpoint.read(folder), target)


def heads_of(checkpoint: HeadsCheckpoint, target: TargetShape) -> Heads:
    """The heads of a checkpoint of any kind except MTP. Raises HeadsError."""
    kind = _kind(checkpoint.config, checkpoint.names)
    if kind == "eagle":
        raise checkpoint.error("they are EAGLE-1 heads, which are not supported; use EAGLE-3, Hydra or Medusa heads")
    if kind not in _LOADERS:
        raise checkpoint.error(f"heads of the kind {kind} are not supported; use {', '.join(_LOADERS)} or mtp")
    return _LOADERS[kind](checkpoint, target)


def _kind(config: Mapping[str, Any], names: frozenset[str]) -> str:
    """The kind of heads, from config.json or else from the tensors' names."""
    if "speculators_model_type" in config:
        return str(config["speculators_model_type"])
    for kind in ("medusa", "hydra"):
        if f"{kind}_num_heads" in config:
            return kind
    if any(name.endswith("hidden_norm.weight") for name in names):
        return "eagle3"
    return "eagle" if {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names else "unknown"


_WEIGHTS = "model.safetensors"


def heads_checkpoint(heads: Heads, num_layers: int) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Config and tensors of heads of a kind that can be trained here; `num_layers` is the target's."""
    if isinstance(heads, MedusaHeads):
        return medusa_checkpoint(heads)
    if isinstance(heads, HydraHeads):
        return hydra_checkpoint(heads, num_layers)
    if isinstance(heads, Eagle3Heads):
        return eagle3_checkpoint(heads)
    raise TypeError(f"heads of the kind {heads.kind} cannot be written")


def save_heads(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a folder of heads. An older checkpoint is replaced atomically; `stored_as` applies `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (_WEIGHTS + ".partial")
    save_file(stored_as(dtype, tensors), partial)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.chmod((folder / "config.json").stat().st_mode)  # safetensors makes its files readable only for the owner
    partial.replace(folder / _WEIGHTS)


def stored_as(dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of heads as they are written.

    Matrices become `dtype`; int8 rounds each output to 127 steps in either direction. Everything else stays float32.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            stored[name] = tensor.detach().cpu().contiguous()
        elif dtype == torch.int8:
            stored[name], stored[name + SCALE] = _to_int8(tensor.detach().float().cpu())
        else:
            stored[name] = tensor.detach().to(dtype).cpu().contiguous()
    return stored


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers [outputs, inputs] and scales [outputs]."""
    scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny * 128) / 127
    return (weight / scale.unsqueeze(1)).round().to(torch.int8), scale
