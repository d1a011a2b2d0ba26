"""Metadata that llama.cpp's converter writes for one kind of model only, by the type of its configuration."""

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

Keys = dict[str, Any]


def _delta_net(config: Any) -> Keys:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
    }


def _qwen_experts(config: Any) -> Keys:
    shared = {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
    return {"expert_count": config.num_experts, "feed_forward_length": None, **shared}


def _sections(config: Any) -> Keys:
    return {"rope.dimension_sections": [2, 1, 1, 0]}


def _mamba2(config: Any) -> Keys:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
    }


def _heads_by_layer(config: Any, kind: str = "full_attention") -> Keys:
    heads = config.num_key_value_heads
    return {"attention.head_count_kv": [heads if own == kind else 0 for own in config.layer_types]}


def _granite_hybrid(config: Any) -> Keys:
    shared = {"expert_shared_feed_forward_length": config.shared_intermediate_size}
    rope = {"rope.scaling.finetuned": config.position_embedding_type == "rope"}
    return _mamba2(config) | _heads_by_layer(config) | shared | rope


def _nemotron_h(config: Any) -> Keys:
    has_experts = "moe" in config.layer_types
    width = config.moe_intermediate_size if has_experts else config.intermediate_size
    return {
        **_heads_by_layer(config),
        "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in config.layer_types],
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        **(_nemotron_experts(config) if has_experts else dict.fromkeys(_OF_EXPERTS)),
    }


def _nemotron_experts(config: Any) -> Keys:
    return {
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_count": config.n_routed_experts,
    }


_OF_EXPERTS = (
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_count"),
    *("expert_weights_scale", "expert_group_count", "expert_group_used_count"),
)


def _lfm2(config: Any) -> Keys:
    convolution = {"shortconv.l_cache": config.conv_L_cache, "vocab_size": config.vocab_size}
    return _heads_by_layer(config) | convolution | {"attention.layer_norm_rms_epsilon": config.norm_eps}


def _lfm2_experts(config: Any) -> Keys:
    return _lfm2(config) | {
        "expert_count": config.num_experts,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
    }


def _latent(config: Any) -> Keys:
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    scale = (config.rope_parameters or {}).get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": None if scale is None else 0.1 * scale,
        "expert_count": config.n_routed_experts,
        "expert_gating_func": 2 if config.model_type == "deepseek_v3" else 1,
        "expert_weights_norm": config.norm_topk_prob,
    }


def _gemma3n(config: Any) -> Keys:
    sparsity = [NormalDist().inv_cdf(part) if part else float("-inf") for part in config.activation_sparsity_pattern]
    return {
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "activation_sparsity_scale": sparsity,
        **_windows(config),
    }


def _gemma4(config: Any) -> Keys:
    heads = [config.per_layer_config[layer].num_key_value_heads for layer in range(config.num_hidden_layers)]
    full = config.per_layer_config[config.layer_types.index("full_attention")].head_dim
    local = config.per_layer_config[config.layer_types.index("sliding_attention")].head_dim
    return {
        "attention.head_count_kv": heads,
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": local,
        "attention.value_length_swa": local,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": local,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        **_windows(config),
    }


def _windows(config: Any) -> Keys:
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types]}


def _glm4_experts(config: Any) -> Keys:
    norm = {"expert_weights_norm": config.norm_topk_prob}
    return {"expert_count": config.n_routed_experts, "expert_gating_func": 2, **norm}


def _minimax(config: Any) -> Keys:
    return {"expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2}


def _ernie_experts(config: Any) -> Keys:
    return {
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_shared_count": config.moe_num_shared_experts,
    }


def _hunyuan_experts(config: Any) -> Keys:
    width = config.intermediate_size
    widths = {"expert_feed_forward_length": width, "expert_shared_feed_forward_length": width}
    counts = {"expert_count": config.num_experts, "expert_used_count": config.moe_topk[0], "expert_shared_count": 1}
    return widths | counts


def _llama4(config: Any) -> Keys:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
    }


def _mistral3(config: Any) -> Keys:
    rope = config.rope_parameters
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _cohere(config: Any) -> Keys:
    own = {"attention.layer_norm_epsilon": config.layer_norm_eps, "rope.scaling.type": "none"}
    return own | {"logit_scale": config.logit_scale}


def _stablelm(config: Any) -> Keys:
    parallel = {"use_parallel_residual": config.use_parallel_residual}
    return {"attention.layer_norm_epsilon": config.layer_norm_eps, **parallel}


OWN: Mapping[str, Callable[[Any], Keys]] = {
    "cohere": _cohere,
    "cohere2": _cohere,
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "ernie4_5_moe": _ernie_experts,
    "falcon_h1": lambda config: _mamba2(config) | {"embedding_scale": None},
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "glm4_moe": _glm4_experts,
    "granitemoehybrid": _granite_hybrid,
    "hunyuan_v1_moe": _hunyuan_experts,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_experts,
    "llama4_text": _llama4,
    "minimax_m2": _minimax,
    "ministral3": _mistral3,
    "nemotron": lambda config: {"attention.layer_norm_epsilon": config.norm_eps, "rope.scaling.type": "none"},
    "nemotron_h": _nemotron_h,
    "olmo": lambda config: {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": config.clip_qkv},
    "olmo3": _windows,
    "olmoe": lambda config: {"expert_count": config.num_experts},
    "qwen3_5_moe_text": lambda config: _delta_net(config) | _qwen_experts(config) | _sections(config),
    "qwen3_5_text": lambda config: _delta_net(config) | _sections(config),
    "qwen3_next": lambda config: _delta_net(config) | _qwen_experts(config),
    "stablelm": _stablelm,
}
