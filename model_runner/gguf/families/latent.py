"""Architectures of GGUF files with multi-head latent attention."""

from collections.abc import Sequence

import numpy as np

from model_runner.gguf.families.dense import latent_yarn
from model_runner.gguf.families.mixtures import NEXT_TOKENS, SIGMOID, SOFTMAX, routed_experts
from model_runner.gguf.layout import Architecture, Combination, Shape
from model_runner.gguf.metadata import Config, Metadata
from model_runner.gguf.weights import Array


def _deepseek(keys: Metadata, base: Config) -> Config:
    """DeepSeek V2, or V3, whose experts' scores are sigmoids."""
    rotated = keys.require("rope.dimension_count")
    rank = keys.require("attention.kv_lora_rank")
    key_dim = keys.get("attention.key_length_mla", base["head_dim"])
    value_dim = keys.get("attention.value_length_mla", keys.get("attention.value_length", key_dim))
    keys.get("attention.value_length")  # of the latents that llama.cpp keeps
    scoring = keys.get("expert_gating_func", SIGMOID if keys.has_tensor("exp_probs_b.bias") else SOFTMAX)
    rope = {name: value for name, value in base["rope_parameters"].items() if name != "partial_rotary_factor"}
    if scale := keys.get("rope.scaling.yarn_log_multiplier"):
        rope = latent_yarn(rope, round(10 * scale, 6))  # converters multiply it by 0.1 in files of this architecture
    config = {
        "head_dim": rotated,
        "num_key_value_heads": base["num_attention_heads"],
        "rope_parameters": rope,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_dim - rotated,
        "v_head_dim": value_dim,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "n_group": keys.get("expert_group_count", 1),
        "topk_group": keys.get("expert_group_used_count", 1),
        **(routed_experts(keys)),
    }
    if scoring == SIGMOID:
        return config
    grouped = config["n_group"] > 1
    own = {"topk_method": "group_limited_greedy" if grouped else "greedy"}
    return config | own | {"model_type": "deepseek_v2"}


def _shape(shapes: Sequence[Shape]) -> Shape:
    (heads, rank, keys), (_, values, _) = shapes
    return heads * (keys + values), rank


def _values(parts: Sequence[Array]) -> Array:
    """Keys [heads, rank, width], values [heads, width, rank] -> rows of each head's keys and values."""
    keys, values = parts
    joined = np.concatenate([keys.transpose(0, 2, 1), values], axis=1)
    return joined.reshape(-1, joined.shape[-1])


_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
}

LATENT = {
    "deepseek2": Architecture(
        "deepseek_v3",
        _deepseek,
        {**_LATENT, **NEXT_TOKENS},
        combinations={"self_attn.kv_b_proj.weight": Combination(_shape, _values)},
    ),
}
"""By `general.architecture`."""
