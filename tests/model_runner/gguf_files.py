"""GGUF files of tiny random models, written by llama.cpp's own library in the way of its converter."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests import tiny_vocabulary

Weights = dict[str, np.ndarray]
_CONTROL, _NORMAL = 3, 1
_ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "granitemoeshared": "granitemoe",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""llama.cpp's names, where they differ from transformers'."""


@dataclass
class Contents:
    """The content of a file, for tests to change."""

    architecture: str
    keys: dict[str, Any]
    tensors: Weights
    raw: dict[str, gguf.GGMLQuantizationType] = field(default_factory=dict)
    """Formats of tensors that are bytes."""

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.keys.items():
            _add(writer, key, value)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(tensor), raw_dtype=self.raw.get(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def contents_of(config: PretrainedConfig, change: Callable[[Any], object] = lambda model: None) -> Contents:
    """A random model of the configuration; `change` is given it before it is written."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval()
    change(model)
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    keys = {f"{architecture}.{key}": value for key, value in (_sizes(config) | _more(config)).items()}
    return Contents(architecture, {**keys, **vocabulary(config.vocab_size)}, _tensors(model, architecture))


def vocabulary(size: int, merges: Sequence[str] = ("a b", "ab c"), last: str = "<last>") -> dict[str, Any]:
    """One of bytes; `last` is its last token."""
    tokens = [*tiny_vocabulary.tokens(size - 1), last]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL if token.startswith("<") else _NORMAL for token in tokens],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _sizes(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
        **_scaling(rope.get("full_attention", rope)),
    }
    named = {key: getattr(config, name, None) for key, name in _NAMED.items()}
    return sizes | {key: value for key, value in named.items() if value}


_NAMED = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] == "longrope":
        attention = math.sqrt(1 + math.log(rope["factor"]) / math.log(rope["original_max_position_embeddings"]))
        return {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.attn_factor": attention,
        }
    if rope["rope_type"] not in ("linear", "yarn"):
        return {}
    keys = {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    original = rope.get("original_max_position_embeddings")
    return keys if original is None else {**keys, "rope.scaling.original_context_length": original}


def _more(config: Any) -> dict[str, Any]:
    """Keys that the converter writes for one kind of model only."""
    if config.model_type in ("qwen2_moe", "qwen3_moe"):
        shared = getattr(config, "shared_expert_intermediate_size", None)
        more = {"expert_count": config.num_experts}
        return more if shared is None else {**more, "expert_shared_feed_forward_length": shared}
    if config.model_type == "dots1":
        more = {"expert_count": config.n_routed_experts, "expert_gating_func": 2}
        return {**more, "expert_weights_norm": config.norm_topk_prob}
    if config.model_type == "granitemoeshared":
        return {"expert_shared_feed_forward_length": config.shared_intermediate_size}
    if config.model_type == "llama":
        return {"vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}
    return {}


def _tensors(model: Any, architecture: str) -> Weights:
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    config = model.config
    tensors = {}
    for parameter_name, parameter in model.state_dict().items():
        if parameter_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        apart = _experts_apart if ".experts." in parameter_name and architecture == "gpt-oss" else _apart
        for name, weight in apart(parameter_name, parameter.numpy()):
            stem, _, suffix = name.rpartition(".")
            if suffix == "sinks":
                stem, suffix = name, "weight"
            tensors[f"{names.get_name(stem)}.{suffix}"] = _stored(name, weight, architecture, config)
    if (factors := _rope_factors(model)) is not None:
        tensors["rope_freqs.weight"] = factors
    for length in ("short", "long"):
        if (values := config.rope_parameters.get(f"{length}_factor")) is not None:
            tensors[f"rope_factors_{length}.weight"] = np.array(values, np.float32)
    return tensors


def _stored(name: str, weight: np.ndarray, architecture: str, config: Any) -> np.ndarray:
    if architecture in PAIRS and ".q_proj" in name:
        return _interleaved(weight, config.num_attention_heads)
    if architecture in PAIRS and ".k_proj" in name:
        return _interleaved(weight, config.num_key_value_heads)
    return weight + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else weight


PAIRS = {"llama", "granite", "granitemoe", "smollm3"}
"""Architectures whose queries and keys llama.cpp rotates in neighbouring pairs."""


def _apart(name: str, weight: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Rows that the converter stores in tensors of their own, under the names that its table knows."""
    name = name.replace("block_sparse_moe.router", "block_sparse_moe.gate").replace("block_sparse_moe", "mlp")
    name = name.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj")
    if name.endswith("experts.gate_up_proj") or "shared_mlp.input_linear" in name:
        base = name.removesuffix(".weight").removesuffix(".gate_up_proj")
        base = base.replace("shared_mlp.input_linear", "mlp.shared_experts")
        gate, up = np.split(weight, 2, axis=-2)
        return [(f"{base}.gate_proj.weight", gate), (f"{base}.up_proj.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", weight)]
    return [(name.replace("e_score_correction_bias", "e_score_correction.bias"), weight)]


def _experts_apart(name: str, weight: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The same of gpt-oss's experts: inputs come before outputs, and rows of gate and up alternate."""
    stem, suffix = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    weight = weight if suffix == "bias" else weight.swapaxes(1, 2)
    if stem.endswith("down_proj"):
        return [(f"{stem}.{suffix}", weight)]
    base = stem.removesuffix("gate_up_proj")
    return [(f"{base}{part}_proj.{suffix}", weight[:, place::2]) for place, part in enumerate(("gate", "up"))]


def _rope_factors(model: Any) -> np.ndarray | None:
    """The divisor of each frequency in Llama 3's scaling, from the frequencies that transformers computed."""
    rope = model.config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    scaled = model.model.rotary_emb.inv_freq.double().numpy()
    plain = rope["rope_theta"] ** (-np.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
    factors: np.ndarray = (plain / scaled).astype(np.float32)
    return factors


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order in which llama.cpp rotates them for this architecture."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
