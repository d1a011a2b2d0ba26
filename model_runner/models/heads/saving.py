"""Writes what checkpoint.py reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model_runner.models.heads.base import Heads
from model_runner.models.heads.checkpoint import SCALE
from model_runner.models.heads.eagle3 import Eagle3Heads, eagle3_checkpoint
from model_runner.models.heads.hydra import HydraHeads, hydra_checkpoint
from model_runner.models.heads.medusa import MedusaHeads, medusa_checkpoint

_WEIGHTS = "model.safetensors"


def heads_checkpoint(heads: Heads, num_layers: int) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Config and tensors of heads of a kind that is trained here; `num_layers` are the target's."""
    if isinstance(heads, MedusaHeads):
        return medusa_checkpoint(heads)
    if isinstance(heads, HydraHeads):
        return hydra_checkpoint(heads, num_layers)
    if isinstance(heads, Eagle3Heads):
        return eagle3_checkpoint(heads)
    raise TypeError(f"heads of the kind {heads.kind} are not written")


def save_heads(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a folder. An older checkpoint there is replaced only by a whole one. For `dtype` see stored_as."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (_WEIGHTS + ".partial")
    save_file(stored_as(dtype, tensors), partial)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.chmod((folder / "config.json").stat().st_mode)  # safetensors lets nobody else read what it writes
    partial.replace(folder / _WEIGHTS)


def stored_as(dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is written for tensors of heads.

    Matrices become `dtype`, where int8 rounds each output to 127 steps either way; everything else stays in float32.
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
