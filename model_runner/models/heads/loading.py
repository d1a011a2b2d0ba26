"""From a folder to heads of whatever kind is in it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model_runner.models.heads.base import Heads, HeadsError, TargetShape
from model_runner.models.heads.checkpoint import HeadsCheckpoint, read_config
from model_runner.models.heads.eagle import load_eagle
from model_runner.models.heads.eagle3 import load_eagle3
from model_runner.models.heads.hydra import load_hydra
from model_runner.models.heads.medusa import load_medusa
from model_runner.models.heads.mtp import load_mtp, mtp_prefix

_LOADERS: dict[str, Callable[[HeadsCheckpoint, TargetShape], Heads]] = {
    "medusa": load_medusa,
    "hydra": load_hydra,
    "eagle": load_eagle,
    "eagle3": load_eagle3,
}


def load_heads(folder: Path, target: TargetShape) -> Heads:
    """Read a checkpoint of Medusa, Hydra, EAGLE-1, EAGLE-2 or EAGLE-3 heads, or a target's own module of MTP.

    Weights are float32 on the CPU; the heads are in evaluation mode and want no gradients.

    Raises:
        HeadsError: if the kind is not known, the heads do not fit the target, or the files are not what they should be.
    """
    config = read_config(folder)
    if config.get("num_nextn_predict_layers"):
        if config.get("model_type") != "deepseek_v3":
            raise HeadsError(f"{folder}: multi-token prediction of {config.get('model_type')} models is not supported")
        return load_mtp(HeadsCheckpoint.read(folder, mtp_prefix(config)), target)
    return heads_of(HeadsCheckpoint.read(folder), target)


def heads_of(checkpoint: HeadsCheckpoint, target: TargetShape) -> Heads:
    """What is in a checkpoint of any kind but MTP; see load_heads."""
    kind = _kind(checkpoint.config, checkpoint.names)
    if kind not in _LOADERS:
        raise checkpoint.error(f"they are of the kind {kind}; known are {', '.join(_LOADERS)} and mtp")
    return _LOADERS[kind](checkpoint, target)


def _kind(config: Mapping[str, Any], names: frozenset[str]) -> str:
    """By what config.json says, else by the names of the tensors."""
    if "speculators_model_type" in config:
        return str(config["speculators_model_type"])
    for kind in ("medusa", "hydra"):
        if f"{kind}_num_heads" in config:
            return kind
    if any(name.endswith("hidden_norm.weight") for name in names):
        return "eagle3"
    return "eagle" if {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names else "unknown"
