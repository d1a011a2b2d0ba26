"""Writes the folders that checkpoint.py reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model_runner.models.heads.checkpoint import SCALE

_WEIGHTS = "model.safetensors"


def save_heads(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a folder. An older checkpoint there is replaced only by a whole one.

    Matrices are stored as `dtype`, where int8 rounds each output to 127 steps either way; everything else in float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            stored[name] = tensor.detach().cpu().contiguous()
        elif dtype == torch.int8:
            stored[name], stored[name + SCALE] = _to_int8(tensor.detach().float().cpu())
        else:
            stored[name] = tensor.detach().to(dtype).cpu().contiguous()
    partial = folder / (_WEIGHTS + ".partial")
    save_file(stored, partial)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.chmod((folder / "config.json").stat().st_mode)  # safetensors lets nobody else read what it writes
    partial.replace(folder / _WEIGHTS)


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers [outputs, inputs] and scales [outputs]."""
    scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny * 128) / 127
    return (weight / scale.unsqueeze(1)).round().to(torch.int8), scale
