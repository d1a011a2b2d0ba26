"""Tiny models of each architecture that GGUF files are read of, by the names of cases in tests."""

from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 36}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
    "rope_theta": 500000.0,
}
_LONG = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0 + 0.125 * pair for pair in range(8)], "long_factor": [1.0 + pair for pair in range(8)]},
}
_LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 40}
_WINDOW = {"sliding_window": 40}
_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LATENT_YARN = {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0}
_LATENT = {
    **{"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **_EXPERTS,
    "head_dim": 8,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
_HYBRID = ["linear_attention", "full_attention", "linear_attention"]
_HYBRID_GRANITE = {
    **_MAMBA2,
    **{"layer_types": _HYBRID, "num_experts_per_tok": 2, "shared_intermediate_size": 44},
}
_NEMOTRON = {
    **{"num_hidden_layers": 4, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
    **{"chunk_size": 16, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 44},
    **_EXPERTS,
}
_CONVOLUTIONS = {
    **{"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
}
_DELTA_NET = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8},
    "layer_types": _HYBRID,
}
_GEMMA4 = {
    **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 24},
    **_WINDOW,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dots1": (
        "dots1",
        {
            **_EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
    ),
    "exaone4": ("exaone4", {"layer_types": ["full_attention"] * 3}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", {**_GEMMA, "num_hidden_layers": 7}),
    "gemma3 with a factor": (
        "gemma3_text",
        {
            **_GEMMA,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": _LOCAL,
            },
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40},
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "granite": ("granite", _GRANITE),
    "granitemoe": (
        "granitemoeshared",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 44},
    ),
    "llama": ("llama", {}),
    "llama with a tied head": ("llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama with linear scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 40}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"sliding_window": 40}),
    "phi3 with LongRoPE": ("phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 64}),
    "qwen2": ("qwen2", {}),
    "qwen2 with YaRN": ("qwen2", {"rope_parameters": _YARN}),
    "qwen2moe": ("qwen2_moe", {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 44}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3moe": ("qwen3_moe", {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "seed_oss": ("seed_oss", {"head_dim": 32}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "use_sliding_window": False}),
    "stablelm": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    "stablelm in parallel": ("stablelm", {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {}),
    "arcee": ("arcee", {}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 40}),
    "command-r": ("cohere", {"use_qk_norm": True}),
    "deepseek2": ("deepseek_v3", {**_LATENT, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}),
    "deepseek2 of V2": ("deepseek_v2", {**_LATENT, "q_lora_rank": None, "rope_parameters": _LATENT_YARN}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 36, "moe_num_shared_experts": 1},
    ),
    "falcon-h1": (
        "falcon_h1",
        {**_MAMBA2, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            **{"num_kv_shared_layers": 2, "sliding_window": 40, "intermediate_size": [100] * 4, "laurel_rank": 8},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320, "altup_num_inputs": 3},
            **{"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            **_GEMMA4,
            **{"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
            "vocab_size_per_layer_input": 320,
        },
    ),
    "gemma4 with experts": (
        "gemma4_text",
        {
            **_GEMMA4,
            **{"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 36},
        },
    ),
    "glm4": ("glm4", {"rope_parameters": _HALF}),
    "glm4moe": (
        "glm4_moe",
        {
            **_EXPERTS,
            **{"n_routed_experts": 4, "n_shared_experts": 1, "use_qk_norm": True, "attention_bias": True},
            **{"routed_scaling_factor": 2.5, "rope_parameters": _HALF, "num_mtp_layers": 0},
        },
    ),
    "granitehybrid": ("granitemoehybrid", {**_GRANITE, **_HYBRID_GRANITE, "num_local_experts": 4}),
    "granitehybrid without experts": ("granitemoehybrid", {**_GRANITE, **_HYBRID_GRANITE, "num_local_experts": 0}),
    "hunyuan-dense": ("hunyuan_v1_dense", {}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [2] * 3}),
    "lfm2": ("lfm2", _CONVOLUTIONS),
    "lfm2moe": ("lfm2_moe", {**_CONVOLUTIONS, **_EXPERTS, "num_experts": 4, "num_dense_layers": 1}),
    "llama4": (
        "llama4_text",
        {
            **{"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96},
            **{"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "no_rope_layers": [1, 1, 1, 0]},
            "interleave_moe_layer_step": 2,
        },
    ),
    "minimax-m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _HALF}),
    "mistral3": ("ministral3", {"rope_parameters": {**_LATENT_YARN, "llama_4_scaling_beta": 0.1}}),
    "nemotron": ("nemotron", {"rope_parameters": _HALF}),
    "nemotron_h": (
        "nemotron_h",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    ),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "olmo3": ("olmo3", {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], **_WINDOW}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2vl": ("qwen2", {}),
    "qwen3vl": ("qwen3", {}),
    "qwen3vlmoe": ("qwen3_moe", {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "qwen35": ("qwen3_5_text", _DELTA_NET),
    "qwen35moe": (
        "qwen3_5_moe_text",
        {**_DELTA_NET, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 44},
    ),
    "qwen3next": ("qwen3_next", {**_DELTA_NET, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 44}),
}
"""Type and configuration of tiny models, at least one for each architecture."""
WITH_IMAGES = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}
"""Architectures of models whose text is another model."""


def make_config(family: str) -> PretrainedConfig:
    model_type, settings = FAMILIES[family]
    config: PretrainedConfig = AutoConfig.for_model(model_type, **{**_SIZES, **settings})
    return config


def stir(model: Any) -> None:
    """Weights that begin as ones or zeros, as norms and biases do, become others."""
    with torch.no_grad():
        for parameter in model.state_dict().values():
            if parameter.dim() == 1 or not parameter.any():
                parameter.add_(0.1 * torch.randn_like(parameter))
