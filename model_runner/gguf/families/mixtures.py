"""Architectures of GGUF files whose layers have attention and experts."""

from model_runner.gguf.base_config import layer_types
from model_runner.gguf.families.dense import HUNYUAN, granite_scales, without_images, without_recurrences
from model_runner.gguf.layout import ONE_ROW, PAIRS, Architecture, Change, experts, mlp
from model_runner.gguf.metadata import Config, Metadata

SOFTMAX, SIGMOID = 1, 2
"""Functions that turn a router's logits into scores."""
NEXT_TOKENS = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
"""A module for multi-token prediction, which is one more layer in the manner of DeepSeek-V3."""
QWEN_EXPERTS = {**mlp("mlp.shared_expert", "_shexp"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_GPT_OSS = {"ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks"}


def granite_mlp(suffix: str) -> dict[str, str]:
    """Paths of the MLP of every Granite with experts."""
    linears = {"gate": "input", "up": "input", "down": "output"}
    return {f"ffn_{name}{suffix}": f"shared_mlp.{linear}_linear" for name, linear in linears.items()}


GRANITE = {**experts("block_sparse_moe.experts", "block_sparse_moe.router"), **granite_mlp("_shexp")}
_MINIMAX = {"exp_probs_b.bias": "mlp.e_score_correction_bias"}


def _counts(keys: Metadata) -> Config:
    """The numbers of experts, in the words of most models."""
    return {
        "num_local_experts": keys.require("expert_count"),
        "num_experts_per_tok": keys.require("expert_used_count"),
    }


def qwen_experts(keys: Metadata, *, normalises: bool = True, has_shared: bool = False) -> Config:
    """The experts of every Qwen, with one that sees every token if `has_shared`."""
    shared = (
        {"shared_expert_intermediate_size": keys.require("expert_shared_feed_forward_length")} if has_shared else {}
    )
    return shared | {
        "num_experts": keys.require("expert_count"),
        "num_experts_per_tok": keys.require("expert_used_count"),
        "moe_intermediate_size": keys.require("expert_feed_forward_length"),
        "norm_topk_prob": keys.get("expert_weights_norm", normalises),
    }


def _qwen2_experts(keys: Metadata, base: Config) -> Config:
    return qwen_experts(keys, normalises=False, has_shared=True) | {"use_sliding_window": False}


def _qwen3_experts(keys: Metadata, base: Config) -> Config:
    return qwen_experts(keys) | {"use_sliding_window": False}


def granite_experts(keys: Metadata, base: Config) -> Config:
    """The experts and factors of every Granite."""
    keys.get("expert_feed_forward_length")  # the same as feed_forward_length
    without_recurrences(keys)
    return granite_scales(keys, base) | {
        **_counts(keys),
        "shared_intermediate_size": keys.get("expert_shared_feed_forward_length", 0),
    }


def routed_experts(keys: Metadata) -> Config:
    """Experts in the manner of DeepSeek: some layers are dense, and some experts see every token."""
    return {
        "n_routed_experts": keys.require("expert_count"),
        "num_experts_per_tok": keys.require("expert_used_count"),
        "moe_intermediate_size": keys.require("expert_feed_forward_length"),
        "n_shared_experts": keys.require("expert_shared_count"),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm", False),
        "num_nextn_predict_layers": keys.get("nextn_predict_layers", 0),
    }


def _one_group(keys: Metadata) -> Config:
    keys.expect("expert_gating_func", SIGMOID)
    keys.expect("expert_group_count", 1)
    keys.expect("expert_group_used_count", 1)
    return routed_experts(keys) | {"n_group": 1, "topk_group": 1}


def _dots1(keys: Metadata, base: Config) -> Config:
    return _one_group(keys) | {"sliding_window": None, "layer_types": layer_types([False] * base["num_hidden_layers"])}


def _glm4(keys: Metadata, base: Config) -> Config:
    return _one_group(keys) | {"use_qk_norm": keys.has_tensor("attn_q_norm.weight")}


def _minimax(keys: Metadata, base: Config) -> Config:
    keys.expect("expert_gating_func", SIGMOID)
    return _counts(keys) | {"intermediate_size": keys.require("expert_feed_forward_length")}


def _ernie(keys: Metadata, base: Config) -> Config:
    keys.get("expert_shared_feed_forward_length")  # converters write another one than the tensors have
    return {
        "moe_num_experts": keys.require("expert_count"),
        "moe_k": keys.require("expert_used_count"),
        "moe_num_shared_experts": keys.get("expert_shared_count", 0),
        "moe_layer_start_index": keys.get("leading_dense_block_count", 0),
        "moe_layer_interval": keys.get("interleave_moe_layer_step", 1),
        "moe_intermediate_size": keys.require("expert_feed_forward_length"),
        "use_bias": keys.has_tensor("attn_q.bias"),
    }


def _hunyuan(keys: Metadata, base: Config) -> Config:
    keys.expect("expert_shared_count", 1)
    width = keys.require("expert_feed_forward_length")
    keys.expect("expert_shared_feed_forward_length", width)
    return {
        "num_experts": keys.require("expert_count"),
        "moe_topk": [keys.require("expert_used_count")] * base["num_hidden_layers"],
        "intermediate_size": width,
    }


def _llama4(keys: Metadata, base: Config) -> Config:
    with_rope = [(layer + 1) % 4 != 0 for layer in range(base["num_hidden_layers"])]
    return {
        **_counts(keys),
        "intermediate_size": keys.require("expert_feed_forward_length"),
        "intermediate_size_mlp": base["intermediate_size"],
        "interleave_moe_layer_step": keys.require("interleave_moe_layer_step"),
        "no_rope_layers": [int(has) for has in with_rope],
        "layer_types": ["chunked_attention" if has else "full_attention" for has in with_rope],
        "attention_chunk_size": 8192,
        "use_qk_norm": keys.require("expert_count") != 128,  # llama.cpp knows the model without by this
        "attn_temperature_tuning": True,
    }


def _olmoe(keys: Metadata, base: Config) -> Config:
    keys.expect("attention.clamp_kqv", 0.0)
    return {
        "num_experts": keys.require("expert_count"),
        "num_experts_per_tok": keys.require("expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": None,
    }


def _gpt_oss(keys: Metadata, base: Config) -> Config:
    keys.expect("rope.freq_base_swa", base["rope_parameters"]["rope_theta"])
    if base["rope_parameters"]["rope_type"] == "yarn":  # files do not say that its bounds are no whole dimensions
        base["rope_parameters"]["truncate"] = False
    return {
        "intermediate_size": keys.get("expert_feed_forward_length", base["intermediate_size"]),
        **_counts(keys),
        "sliding_window": keys.require("attention.sliding_window"),
        "layer_types": layer_types([layer % 2 == 0 for layer in range(base["num_hidden_layers"])]),
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


_HUNYUAN = {**HUNYUAN, "ffn_gate_inp": "mlp.gate.wg", **mlp("mlp.shared_mlp", "_shexp")}
_ERNIE = {"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"}
_LLAMA4 = {
    **experts("feed_forward.experts", "feed_forward.router"),
    **mlp("feed_forward.shared_expert", "_shexp"),
    **mlp("feed_forward"),
}

MIXTURES = {
    "dots1": Architecture("dots1", _dots1),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", _ernie, _ERNIE, changes={"exp_probs_b": Change(shape=lambda config, shape: (1, shape[-1]))}
    ),
    "glm4moe": Architecture("glm4_moe", _glm4, NEXT_TOKENS),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, _GPT_OSS),
    "granitemoe": Architecture("granitemoeshared", granite_experts, GRANITE, changes=PAIRS, some_layers=True),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", _hunyuan, _HUNYUAN),
    "llama4": Architecture("llama4_text", _llama4, _LLAMA4),
    "minimax-m2": Architecture("minimax_m2", _minimax, _MINIMAX),
    "olmoe": Architecture("olmoe", _olmoe),
    "qwen2moe": Architecture("qwen2_moe", _qwen2_experts, QWEN_EXPERTS, changes={"ffn_gate_inp_shexp": ONE_ROW}),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_experts),
    "qwen3vlmoe": Architecture("qwen3_moe", lambda keys, base: without_images(_qwen3_experts(keys, base), keys)),
}
"""By `general.architecture`."""
