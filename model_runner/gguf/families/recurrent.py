"""Architectures of GGUF files in which some layers have recurrences or convolutions instead of attention, or both."""

from functools import partial

import numpy as np

from model_runner.gguf.families.dense import granite_scales
from model_runner.gguf.families.mixtures import GRANITE, QWEN_EXPERTS, SIGMOID, granite_mlp, qwen_experts
from model_runner.gguf.layout import (
    CONVOLUTION,
    DECAY,
    MAMBA2,
    MINUS_ONE,
    ONE_ROW,
    PAIRS,
    Architecture,
    Change,
    experts,
    mamba2,
    mlp,
)
from model_runner.gguf.metadata import Config, Metadata
from model_runner.gguf.weights import Array
from model_runner.refusal import UnsupportedModelError

# -- gated delta nets --------------------------------------------------------------------------------------------------


def _delta_net(keys: Metadata, base: Config) -> Config:
    """Qwen's layers of which every fourth has attention, and all others a gated delta net."""
    layers, heads = base["num_hidden_layers"], keys.require("ssm.time_step_rank")
    interval = keys.get("full_attention_interval", 4)
    pattern = keys.get("attention.recurrent_layers", [(layer + 1) % interval != 0 for layer in range(layers)])
    recurrent = keys.of_layers("attention.recurrent_layers", pattern, layers)
    if (modules := keys.get("nextn_predict_layers", 0)) > 1:
        raise UnsupportedModelError(f"it has {modules} modules for multi-token prediction; only one is supported")
    return {
        "layer_types": ["linear_attention" if has else "full_attention" for has in recurrent],
        "linear_conv_kernel_dim": keys.require("ssm.conv_kernel"),
        "linear_key_head_dim": keys.require("ssm.state_size"),
        "linear_value_head_dim": keys.require("ssm.inner_size") // heads,
        "linear_num_key_heads": keys.require("ssm.group_count"),
        "linear_num_value_heads": heads,
        "mtp_num_hidden_layers": modules,
    }


def _qwen35(keys: Metadata, base: Config) -> Config:
    sections = [size for size in keys.get("rope.dimension_sections", []) if size]
    rope = base["rope_parameters"] | ({"mrope_section": sections, "mrope_interleaved": True} if sections else {})
    return _delta_net(keys, base) | {"rope_parameters": rope}


def _qwen35_experts(keys: Metadata, base: Config) -> Config:
    return _qwen35(keys, base) | qwen_experts(keys, has_shared=True)


def _qwen3_next(keys: Metadata, base: Config) -> Config:
    return _delta_net(keys, base) | qwen_experts(keys, has_shared=True)


_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
_BESIDE_PREDICTION = ("fc.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "norm.")


def _prediction(path: str, layer: int) -> str:
    """Qwen's name of a part of the module for multi-token prediction."""
    return f"mtp.{path}" if path.startswith(_BESIDE_PREDICTION) else f"mtp.layers.0.{path}"


def _by_key_head(config: Config, rows: int, first: int, width: int) -> Array | None:
    """The stored row of each of so many: from row `first`, files have one value head of each key head in turn."""
    key_heads = config["linear_num_key_heads"]
    if (group := config["linear_num_value_heads"] // key_heads) == 1:
        return None
    turns = np.arange(rows - first).reshape(group, key_heads, width)
    return np.concatenate([np.arange(first), first + turns.swapaxes(0, 1).reshape(-1)])


def _values(config: Config, rows: int) -> Array | None:
    """Rows of value heads, of any width."""
    return _by_key_head(config, rows, 0, rows // config["linear_num_value_heads"])


def _after_keys(config: Config, rows: int) -> Array | None:
    """Rows of queries, keys and value heads."""
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return _by_key_head(config, rows, keys, config["linear_value_head_dim"])


def _value_inputs(config: Config, columns: int) -> Array | None:
    """The input of each stored column, where inputs are value heads."""
    order = _values(config, columns)
    return None if order is None else np.argsort(order)


_NEXT_DELTA_NET = {
    "ssm_norm": Change(),
    "ssm_a": DECAY,
    "ssm_conv1d": CONVOLUTION,
    "nextn.enorm": MINUS_ONE,
    "nextn.hnorm": MINUS_ONE,
    "nextn.shared_head_norm": MINUS_ONE,
    "ffn_gate_inp_shexp": ONE_ROW,
}
_TURNED_DELTA_NET = {
    **_NEXT_DELTA_NET,
    "attn_qkv": Change(_after_keys),
    "ssm_conv1d": Change(_after_keys, shape=CONVOLUTION.shape),
    **dict.fromkeys(("attn_gate", "ssm_beta", "ssm_alpha", "ssm_dt"), Change(_values)),
    "ssm_a": Change(_values, values=DECAY.values),
    "ssm_out": Change(input_order=_value_inputs),
}
_qwen = partial(Architecture, norm_adds_one=True, extra_layers=_prediction)

# -- Mamba 2 -----------------------------------------------------------------------------------------------------------


def _mamba2(keys: Metadata) -> Config:
    """Sizes in the words of most models."""
    heads = keys.require("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": keys.require("ssm.inner_size") // heads,
        "mamba_n_groups": keys.require("ssm.group_count"),
        "mamba_d_state": keys.require("ssm.state_size"),
        "mamba_d_conv": keys.require("ssm.conv_kernel"),
        "mamba_conv_bias": keys.has_tensor("ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has_tensor("ssm_in.bias"),
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    }


def _granite_hybrid(keys: Metadata, base: Config) -> Config:
    attends = keys.layers_with("attention.head_count_kv", base["num_hidden_layers"])
    shared = keys.get("expert_shared_feed_forward_length", 0)
    shared = shared if keys.get("expert_count") else keys.shape_of("ffn_up.weight")[0]
    inner = keys.require("ssm.inner_size")
    keys.get("expert_feed_forward_length")  # the same as feed_forward_length
    return {
        **granite_scales(keys, base),
        **_mamba2(keys),
        "layer_types": ["full_attention" if has else "linear_attention" for has in attends],
        "mamba_expand": inner // base["hidden_size"],
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned", True) else None,
        "num_local_experts": keys.get("expert_count", 0),
        "num_experts_per_tok": keys.get("expert_used_count", 0),
        "shared_intermediate_size": shared,
    }


_GRANITE_HYBRID = {**mamba2("mamba"), **GRANITE, **granite_mlp("")}


def _nemotron_h(keys: Metadata, base: Config) -> Config:
    layers = base["num_hidden_layers"]
    attends = keys.layers_with("attention.head_count_kv", layers)
    has_mlp = keys.layers_with("feed_forward_length", layers)
    mlp = "moe" if keys.has_tensor("ffn_gate_inp.weight") else "mlp"
    kinds = ["full_attention" if a else mlp if m else "linear_attention" for a, m in zip(attends, has_mlp, strict=True)]
    heads = keys.require("ssm.time_step_rank")
    epsilon = keys.get("attention.layer_norm_epsilon")
    return {
        "layers_block_type": kinds,
        "layer_types": kinds,
        "layer_norm_epsilon": base.get("rms_norm_eps", epsilon),
        "mamba_num_heads": heads,
        "mamba_head_dim": keys.require("ssm.inner_size") // heads,
        "n_groups": keys.require("ssm.group_count"),
        "ssm_state_size": keys.require("ssm.state_size"),
        "conv_kernel": keys.require("ssm.conv_kernel"),
        "use_conv_bias": keys.has_tensor("ssm_conv1d.bias"),
        "use_bias": keys.has_tensor("ssm_in.bias"),
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "time_step_min": 0.001,
        **(_nemotron_experts(keys) if mlp == "moe" else {}),
    }


def _nemotron_experts(keys: Metadata) -> Config:
    keys.expect("expert_gating_func", SIGMOID)
    return {
        "n_routed_experts": keys.require("expert_count"),
        "num_experts_per_tok": keys.require("expert_used_count"),
        "n_shared_experts": keys.get("expert_shared_count", 1),
        "moe_intermediate_size": keys.require("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.require("expert_shared_feed_forward_length"),
        "moe_latent_size": keys.get("moe_latent_size"),
        "norm_topk_prob": keys.get("expert_weights_norm", True),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "n_group": keys.get("expert_group_count", 1),
        "topk_group": keys.get("expert_group_used_count", 1),
        "num_nextn_predict_layers": keys.get("nextn_predict_layers", 0),
    }


_NEMOTRON_H = {
    **mamba2("mixer"),
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps.weight": "mixer.experts.up_proj",
    "ffn_down_exps.weight": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_AROUND_NEMOTRON_H = {"token_embd": "model.embeddings", "output_norm": "model.norm_f"}


def _falcon_h1(keys: Metadata, base: Config) -> Config:
    """Its factors are 1: converters multiply them into the weights."""
    return {
        **_mamba2(keys),
        "mamba_d_ssm": keys.require("ssm.inner_size"),
        "mamba_rms_norm": keys.has_tensor("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": keys.has_tensor("ssm_out.bias"),
    }


_FALCON_H1 = {
    **mamba2("mamba"),
    "ffn_norm": "pre_ff_layernorm.weight",
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    **mlp("feed_forward"),
}

# -- short convolutions ------------------------------------------------------------------------------------------------


def _lfm2(keys: Metadata, base: Config) -> Config:
    attends = keys.layers_with("attention.head_count_kv", base["num_hidden_layers"])
    return {
        "layer_types": ["full_attention" if has else "conv" for has in attends],
        "conv_L_cache": keys.require("shortconv.l_cache"),
        "conv_bias": keys.has_tensor("shortconv.conv.bias"),
        "norm_eps": keys.require("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_experts(keys: Metadata, base: Config) -> Config:
    keys.expect("expert_gating_func", SIGMOID)
    return _lfm2(keys, base) | {
        **qwen_experts(keys),
        "num_dense_layers": keys.get("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "use_expert_bias": keys.has_tensor("exp_probs_b.bias"),
    }


_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    **experts("feed_forward.experts", "feed_forward.gate"),
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_AROUND_LFM2 = {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}
_lfm = partial(
    Architecture, names=_LFM2, around=_AROUND_LFM2, changes={"shortconv.conv": CONVOLUTION}, some_layers=True
)

RECURRENT = {
    "falcon-h1": Architecture("falcon_h1", _falcon_h1, _FALCON_H1, {"output_norm": "model.final_layernorm"}, MAMBA2),
    "granitehybrid": Architecture(
        "granitemoehybrid", _granite_hybrid, _GRANITE_HYBRID, changes=PAIRS | MAMBA2, some_layers=True
    ),
    "lfm2": _lfm("lfm2", _lfm2),
    "lfm2moe": _lfm("lfm2_moe", _lfm2_experts),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        Architecture("nemotron_h", _nemotron_h, _NEMOTRON_H, _AROUND_NEMOTRON_H, PAIRS | MAMBA2, some_layers=True),
    ),
    "qwen35": _qwen("qwen3_5_text", _qwen35, _DELTA_NET, changes=_TURNED_DELTA_NET),
    "qwen35moe": _qwen("qwen3_5_moe_text", _qwen35_experts, _DELTA_NET | QWEN_EXPERTS, changes=_TURNED_DELTA_NET),
    "qwen3next": _qwen("qwen3_next", _qwen3_next, _DELTA_NET | QWEN_EXPERTS, changes=_NEXT_DELTA_NET),
}
"""By `general.architecture`."""
