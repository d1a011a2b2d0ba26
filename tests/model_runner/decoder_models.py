"""Tiny random models of the families that run natively, and what their layers saw and answered."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 84,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,  # not hidden_size / heads
    "max_position_embeddings": 1024,
    "rms_norm_eps": 0.03,  # so large that a wrong one shows
    "attention_dropout": 0.1,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_GEMMA = {"query_pre_attn_scalar": 50, "sliding_window": 16, "layer_types": _ALTERNATING, "attention_bias": True}
_GRANITE = {
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 5.0,
    "attention_bias": True,
}
_GRANITE_HYBRID = {
    **_GRANITE,
    "shared_intermediate_size": 84,
    "layer_types": ["full_attention"] * 4,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "mamba_n_heads": 8,
}

_TINY_EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "crop_size": 28,
}
_TINY_EARS = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 16,
    "nemo_conv_channels": 16,
    "depthwise_separable_out_channel": 16,
}

_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
_SIGMOID_EXPERTS = {
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
}

# Configuration apart from the sizes, by a case's name, which begins with the model type.
CASES: dict[str, dict[str, Any]] = {
    "cwm": {"layer_types": _ALTERNATING, "sliding_window": 16, "rope_parameters": _LLAMA3_ROPE},
    "dots1": {
        **_SIGMOID_EXPERTS,
        "first_k_dense_replace": 1,
        "sliding_window": 16,
        "max_window_layers": 2,
        "attention_bias": True,
    },
    "dots1 not normalised": {**_SIGMOID_EXPERTS, "norm_topk_prob": False},
    "emu3": {"text_config": {**_SIZES, "attention_bias": True, "bos_token_id": 1, "eos_token_id": 2}},
    "exaone": {},
    "exaone4": {"layer_types": _ALTERNATING, "sliding_window": 16},
    "exaone4 without windows": {"layer_types": ["full_attention"] * 4, "sliding_window": None},
    "gemma": {"hidden_act": "gelu_pytorch_tanh", "attention_bias": True},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_GEMMA, "attn_logit_softcapping": 2.0},
    "gpt_oss": {
        **_EXPERTS,
        "layer_types": _ALTERNATING,
        "sliding_window": 16,
        "rope_parameters": {**_YARN_ROPE, "truncate": False},
        "swiglu_limit": 1.0,  # so small that it shows
    },
    "granite": {**_GRANITE, "mlp_bias": True},
    "granitemoe": {**_GRANITE, **_EXPERTS},
    "granitemoehybrid": _GRANITE_HYBRID,
    "granitemoehybrid with experts": {**_GRANITE_HYBRID, **_EXPERTS},
    "granitemoehybrid without positions": {**_GRANITE_HYBRID, "position_embedding_type": None},
    "granitemoeshared": {**_GRANITE, **_EXPERTS, "shared_intermediate_size": 60},
    "granitemoeshared without shared experts": {**_GRANITE, **_EXPERTS, "shared_intermediate_size": 0},
    "hyperclovax": {**_GRANITE, "use_post_norm": True},
    "hyperclovax without post norms": {**_GRANITE, "use_post_norm": False},
    "internlm3": _BIASES,
    "iquestcoder": {},
    "llama": {"rope_parameters": _LLAMA3_ROPE},
    "llama with biases": {**_BIASES, "rope_parameters": _YARN_ROPE},
    "mellum": {
        **_QWEN_EXPERTS,
        "layer_types": _ALTERNATING,
        "sliding_window": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "ministral": {"layer_types": _ALTERNATING, "sliding_window": 16},
    "mistral": {"sliding_window": 16},
    "mistral without windows": {"sliding_window": None, "hidden_act": "gelu_new"},
    "mixtral": {**_EXPERTS, "sliding_window": 16},
    "mixtral with all experts": {"num_local_experts": 3, "num_experts_per_tok": 3, "hidden_act": "gelu_new"},
    "phi3": {"rope_parameters": _PARTIAL_ROPE, "resid_pdrop": 0.1},
    "phi3 with windows": {"sliding_window": 16},
    "phi4_multimodal": {
        "rope_parameters": _PARTIAL_ROPE,
        "vision_config": _TINY_EYES,
        "audio_config": _TINY_EARS,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "hidden_act": "swish"},
    "qwen2_moe": {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 60, "decoder_sparse_step": 2},
    "qwen2_moe with windows": {
        **_QWEN_EXPERTS,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 60,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 2,
    },
    "qwen3": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "attention_bias": True},
    "qwen3_moe": {
        **_QWEN_EXPERTS,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 16,
        "attention_bias": True,
    },
    "qwen3_moe not normalised": {**_QWEN_EXPERTS, "num_experts": 20},
    "seed_oss": {**_BIASES, "attention_out_bias": True, "residual_dropout": 0.1},
    "smollm3": {
        "no_rope_layers": [1, 1, 0, 0],
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": _ALTERNATING,
        **_BIASES,
    },
    "solar_open": {**_SIGMOID_EXPERTS, "attention_bias": True},
    "vaultgemma": {**_GEMMA, "attn_logit_softcapping": 2.0},
}


_DELTA_NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 1]}

_MAMBA2 = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "time_step_limit": (0.5, 1.0),
}
_NEMOTRON_H = {
    "layer_norm_epsilon": 0.03,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "n_groups": 2,
    "time_step_min": 0.5,
    **_SIGMOID_EXPERTS,
    "moe_shared_expert_intermediate_size": 60,
    "moe_latent_size": 24,
}

# The same for models with recurrent layers.
HYBRIDS: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        **_MAMBA2,
        **_BIASES,
        "mamba_d_ssm": 96,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.3,
        "attention_in_multiplier": 0.6,
        "attention_out_multiplier": 1.5,
        "key_multiplier": 0.7,
        "mlp_multipliers": [0.8, 1.7],
        "ssm_in_multiplier": 1.3,
        "ssm_multipliers": [0.6, 0.7, 1.4, 1.6, 0.5],
        "ssm_out_multiplier": 0.4,
    },
    "falcon_h1 with norms": {**_MAMBA2, "mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "granitemoehybrid with Mamba 2": {
        **_GRANITE_HYBRID,
        **_EXPERTS,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        **_MAMBA2,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "head_dim": 12,
        "norm_eps": 0.03,
        "conv_bias": True,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 36,
        "head_dim": 12,
        "norm_eps": 0.03,
        "routed_scaling_factor": 1.7,
    },
    "lfm2_moe without a bias of the choice": {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 0,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 36,
        "head_dim": 12,
        "norm_topk_prob": False,
        "use_expert_bias": False,
    },
    "nemotron_h": {
        **_NEMOTRON_H,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "mlp_bias": True,
        "moe_latent_size": None,
    },
    "nemotron_h with latents": {
        **_NEMOTRON_H,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "mlp_bias": True,
    },
    "olmo_hybrid": {
        **_DELTA_NETS,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "attention_bias": True,
    },
    "olmo_hybrid without positions": {
        **_DELTA_NETS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "linear_allow_neg_eigval": False,
    },
    "qwen3_5_text": {
        **_DELTA_NETS,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "rope_parameters": _SECTIONS,
        "attention_bias": True,
    },
    "qwen3_5_moe_text": {
        **_DELTA_NETS,
        **_QWEN_EXPERTS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "shared_expert_intermediate_size": 60,
        "rope_parameters": _SECTIONS,
    },
    "qwen3_next": {
        **_DELTA_NETS,
        **_QWEN_EXPERTS,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "shared_expert_intermediate_size": 60,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "rope_parameters": _PARTIAL_ROPE,
    },
}


@dataclass(frozen=True, slots=True)
class LayerRun:
    """One decoder layer, and one call of it."""

    layer: nn.Module
    hidden: Tensor  # [tokens, hidden]
    cos_sin: tuple[Tensor, Tensor] | None  # each [tokens, rotary_dim]
    answer: Tensor  # [tokens, hidden]


def tiny_model(case: str, **changes: Any) -> PreTrainedModel:
    """A model in evaluation mode, every parameter of it random, norms and biases included."""
    config = AutoConfig.for_model(case.split(maxsplit=1)[0], **{**_SIZES, **(CASES | HYBRIDS).get(case, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.normal_(std=scale, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.1, generator=generator)
    return model


def layer_runs(model: PreTrainedModel, num_tokens: int) -> list[LayerRun]:
    """Inputs and outputs of each decoder layer for random tokens."""
    runs: list[LayerRun] = []

    def note(layer: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any], answer: Tensor) -> None:
        embeddings = kwargs["position_embeddings"]
        cos_sin = None if embeddings is None else (embeddings[0][0], embeddings[1][0])
        runs.append(LayerRun(layer, args[0][0], cos_sin, answer[0]))

    for layer in model.model.layers:
        layer.register_forward_hook(note, with_kwargs=True)
    tokens = torch.randint(3, 300, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(tokens.to(model.device), use_cache=False)
    return runs
