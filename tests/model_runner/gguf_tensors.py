"""Tensors of tiny random models as llama.cpp's converter stores them, under the names of its own library."""

import re
from typing import Any

import gguf
import numpy as np

Weights = dict[str, np.ndarray]
PAIRS = {
    *("llama", "granite", "granitehybrid", "granitemoe", "smollm3", "arcee", "mistral3", "nemotron_h"),
    *("nemotron_h_moe", "olmo"),
}
"""Architectures whose queries and keys are stored in neighbouring pairs."""
_ADDS_ONE = {"gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next"}
"""Architectures whose norms are stored as 1 + weight."""
_RENAMED = {
    "block_sparse_moe.router": "block_sparse_moe.gate",
    "shared_mlp.output_linear": "mlp.shared_experts.down_proj",
    "mlp.gate.moe_statics": "mlp.moe_statics",
    ".dt_bias": ".dt_proj.bias",
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".expert_bias": ".expert_bias.bias",
    ".correct_output_scale": ".correct_output_scale.weight",
    ".layer_scalar": ".layer_scalar.weight",
}
"""Parts of names, and those that the library's table knows."""
_PART = re.compile(r"(.*(?:altup_(?:unembed_)?projections|self_attn\.[qk]_layernorm))(?:\.norms)?\.\d+\.weight")
"""Parameters that files have in one tensor."""


def tensors_of(model: Any, architecture: str) -> Weights:
    """The tensors of a file, by their names in it."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    config = model.config
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors: Weights = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for parameter_name, parameter in model.state_dict().items():
        if parameter_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for name, weight in _apart(parameter_name, parameter.numpy(), architecture, config):
            if (part := _PART.fullmatch(name)) is not None:
                stacks.setdefault(f"{part[1]}.weight", []).append(weight)
            else:
                tensors[_file_name(names, name)] = _stored(name, weight, architecture, config)
    tensors |= {_file_name(names, name): np.stack(weights) for name, weights in stacks.items()}
    rope = getattr(config, "rope_parameters", None) or {}
    if (factors := _rope_factors(model, rope)) is not None:
        tensors["rope_freqs.weight"] = factors
    for length in ("short", "long"):
        if (values := rope.get(f"{length}_factor")) is not None:
            tensors[f"rope_factors_{length}.weight"] = np.array(values, np.float32)
    return tensors


def _file_name(names: gguf.TensorNameMap, name: str) -> str:
    if name.endswith(("A_log", ".D", "pre_ff_layernorm.weight")):
        return str(names.get_name(name))
    stem, _, suffix = name.rpartition(".")
    if suffix == "sinks":
        stem, suffix = name, "weight"
    if suffix == "per_expert_scale":
        return str(names.get_name(stem.replace("router", "experts.down_proj"))) + ".scale"
    if suffix == "scale":
        return str(names.get_name(f"{stem}.proj")) + ".scale"
    return f"{names.get_name(stem)}.{suffix}"


def _stored(name: str, weight: np.ndarray, architecture: str, config: Any) -> np.ndarray:
    """The numbers of a tensor as files have them."""
    if architecture in PAIRS and ".q_proj" in name:
        return _interleaved(weight, config.num_attention_heads)
    if architecture in PAIRS and ".k_proj" in name:
        return _interleaved(weight, config.num_key_value_heads)
    if architecture in _ADDS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        return weight + 1
    if name.endswith("A_log"):
        weight = -np.exp(weight)
    if "conv" in name and weight.ndim == 3:
        weight = weight.squeeze(1)
    if "linear_attn" in name and architecture != "qwen3next":
        return _turned(name, weight, config)
    if name.endswith(("A_log", ".D")) and "linear_attn" not in name:
        return weight.reshape(-1, 1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return weight.reshape(config.n_groups if "mixer" in name else config.mamba_n_groups, -1)
    return weight


def _turned(name: str, weight: np.ndarray, config: Any) -> np.ndarray:
    """Qwen 3.5's value heads: one of each key head in turn, not all of a key head together."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    first = 2 * keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    if name.endswith("linear_attn.norm.weight"):
        return weight
    axis = 1 if "out_proj" in name else 0
    weight = np.moveaxis(weight, axis, 0)
    values = weight[first:]
    turned = values.reshape(keys, heads // keys, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    return np.moveaxis(np.concatenate([weight[:first], turned]), 0, axis)


def _apart(name: str, weight: np.ndarray, architecture: str, config: Any) -> list[tuple[str, np.ndarray]]:
    """Tensors that a parameter becomes, under the names that the library's table knows."""
    if getattr(config, "num_local_experts", None) == 0:
        name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
    for own, known in _RENAMED.items():
        name = name.replace(own, known)
    if ".mixer." in name:
        name = name.replace("model.layers", "backbone.layers")
    if ".experts." in name or "shared_mlp.input_linear" in name:
        parts = _experts_apart(name, weight, architecture)
        is_dense = getattr(config, "num_local_experts", None) == 0
        return [(part.replace("shared_experts.", "") if is_dense else part, rows) for part, rows in parts]
    if name.endswith("kv_b_proj.weight"):
        heads = weight.reshape(config.num_attention_heads, -1, weight.shape[1])
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        stem = name.removesuffix("kv_b_proj.weight")
        return [(f"{stem}k_b_proj.weight", keys.swapaxes(1, 2)), (f"{stem}v_b_proj.weight", values)]
    if name.endswith("in_proj_qkvz.weight"):
        heads, width = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads // heads * config.linear_value_head_dim
        parts = np.split(weight.reshape(heads, -1, weight.shape[1]), np.cumsum([width, width, values]), axis=1)
        rows = [part.reshape(-1, weight.shape[1]) for part in parts]
        stem = name.removesuffix("qkvz.weight")
        return [(f"{stem}qkv.weight", np.concatenate(rows[:3])), (f"{stem}z.weight", rows[3])]
    return [(name, weight)]


def _experts_apart(name: str, weight: np.ndarray, architecture: str) -> list[tuple[str, np.ndarray]]:
    """Gate and up of experts, whose rows follow one another or, in gpt-oss, alternate."""
    stem, suffix = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    stem = stem.removesuffix(".weight")
    for own, known in (
        ("mixer.experts", "mlp.experts"),
        ("block_sparse_moe.experts", "mlp.experts"),
        ("shared_mlp.input_linear", "mlp.shared_experts.gate_up_proj"),
    ):
        stem = stem.replace(own, known)
    stem = stem.replace("backbone.layers", "model.layers")
    if architecture in ("gpt-oss", "llama4") and weight.ndim == 3:
        weight = weight.swapaxes(1, 2)
    if not stem.endswith("gate_up_proj") or architecture == "gemma4":
        return [(f"{stem}.{suffix}", weight)]
    base = stem.removesuffix("gate_up_proj")
    if architecture == "gpt-oss":
        return [(f"{base}{part}_proj.{suffix}", weight[:, place::2]) for place, part in enumerate(("gate", "up"))]
    gate, up = np.split(weight, 2, axis=-2)
    return [(f"{base}gate_proj.weight", gate), (f"{base}up_proj.weight", up)]


def _rope_factors(model: Any, rope: dict[str, Any]) -> np.ndarray | None:
    """The divisor of each frequency in Llama 3's scaling or Gemma 4's, from the frequencies of transformers."""
    if (full := rope.get("full_attention", {})).get("rope_type") == "proportional":
        frequencies = model.model.rotary_emb.full_attention_inv_freq
        turning = int((frequencies != 0).sum())
        assert turning == int(len(frequencies) * full["partial_rotary_factor"])
        return np.array([1.0] * turning + [1e30] * (len(frequencies) - turning), np.float32)
    if rope.get("rope_type") != "llama3":
        return None
    scaled = model.model.rotary_emb.inv_freq.double().numpy()
    plain = rope["rope_theta"] ** (-np.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
    factors: np.ndarray = (plain / scaled).astype(np.float32)
    return factors


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order in which llama.cpp rotates them for this architecture."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
