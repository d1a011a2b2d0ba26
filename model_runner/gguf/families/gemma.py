"""Gemma's architectures of GGUF files."""

from math import inf
from statistics import NormalDist
from typing import Any

from model_runner.gguf.base_config import layer_types, local_rope, window_pattern
from model_runner.gguf.layout import Architecture, experts
from model_runner.gguf.metadata import Config, Metadata

_SANDWICH = {"ffn_norm": "pre_feedforward_layernorm"}
_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
"""Embeddings that each layer has of its own."""
_AROUND_PER_LAYER = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA3N = {
    **_SANDWICH,
    **_PER_LAYER,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_AROUND_GEMMA3N = {
    **_AROUND_PER_LAYER,
    "altup_proj.weight": "model.altup_projections.{}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
}
_GEMMA4 = {
    **_SANDWICH,
    **_PER_LAYER,
    **experts("experts", "router.proj"),
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
}
_GEMMA4_KEYS = frozenset({"attention.head_count_kv", "feed_forward_length"})


def _gemma(keys: Metadata, base: Config) -> Config:
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


def _scale_of_queries(base: Config, large: int) -> int:
    """The number whose inverse root scales queries: llama.cpp knows the largest model by its number of layers."""
    if base["num_hidden_layers"] == large:
        return int(base["hidden_size"]) // int(base["num_attention_heads"])
    return int(base["head_dim"])


def _gemma2(keys: Metadata, base: Config) -> Config:
    layers = base["num_hidden_layers"]
    return _gemma(keys, base) | {
        "query_pre_attn_scalar": _scale_of_queries(base, large=46),
        "sliding_window": keys.get("attention.sliding_window", 4096),
        "layer_types": layer_types([layer % 2 == 0 for layer in range(layers)]),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Metadata, base: Config) -> Config:
    window = keys.get("attention.sliding_window", 0)
    pattern = window_pattern(keys, base, period=6) if window else [False] * base["num_hidden_layers"]
    return _gemma(keys, base) | {
        "query_pre_attn_scalar": _scale_of_queries(base, large=62),
        "sliding_window": window or base["max_position_embeddings"],
        "layer_types": layer_types(pattern),
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
        "attn_logit_softcapping": None,
        "rope_parameters": {"full_attention": base["rope_parameters"], "sliding_attention": local_rope(keys)},
    }


def _gemma3n(keys: Metadata, base: Config) -> Config:
    layers = base["num_hidden_layers"]
    # Files have the number of standard deviations below which activations count as zero.
    scales = keys.of_layers("activation_sparsity_scale", keys.get("activation_sparsity_scale", -inf), layers)
    per_layer = keys.require("embedding_length_per_layer_input")
    return _gemma(keys, base) | {
        "intermediate_size": [base["intermediate_size"]] * layers,
        "sliding_window": keys.require("attention.sliding_window"),
        "layer_types": layer_types(window_pattern(keys, base, period=5)),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
        "rope_parameters": {"full_attention": base["rope_parameters"], "sliding_attention": local_rope(keys)},
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": base["vocab_size"],
        "altup_active_idx": keys.get("altup.active_idx", 0),
        "laurel_rank": keys.shape_of("laurel_l.weight")[0],
        "altup_num_inputs": keys.require("altup.num_inputs"),
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", max(layers - 20, 0)),
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 4) for scale in scales],
    }


def _gemma4(keys: Metadata, base: Config) -> Config:
    layers, shared = base["num_hidden_layers"], keys.get("attention.shared_kv_layers", 0)
    windows = window_pattern(keys, base, period=6)
    global_dim, local_dim = base["head_dim"], keys.require("attention.key_length_swa")
    keys.expect("attention.value_length_swa", local_dim)
    keys.expect("rope.dimension_count_swa", local_dim)
    widths = keys.of_layers("feed_forward_length", keys.require("feed_forward_length"), layers)
    heads = keys.of_layers("attention.head_count_kv", keys.require("attention.head_count_kv"), layers)
    local_heads, global_heads = (_first(heads, windows, has) for has in (True, False))
    with_values = keys.layers_with_tensor("attn_v.weight")
    config = _gemma(keys, base) | {
        "head_dim": local_dim,
        "global_head_dim": global_dim,
        "num_key_value_heads": local_heads,
        "num_global_key_value_heads": None if global_heads == local_heads else global_heads,
        "attention_k_eq_v": any(layer not in with_values and not windows[layer] for layer in range(layers - shared)),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "sliding_window": keys.require("attention.sliding_window"),
        "layer_types": layer_types(windows),
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
        "rope_parameters": {"full_attention": base["rope_parameters"], "sliding_attention": local_rope(keys)},
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": base["vocab_size"],
        "num_kv_shared_layers": shared,
    }
    return config | _gemma4_experts(keys)


def _gemma4_experts(keys: Metadata) -> Config:
    if not keys.get("expert_count"):
        keys.get("expert_feed_forward_length")
        keys.expect("expert_used_count", 0)
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": keys.require("expert_count"),
        "top_k_experts": keys.require("expert_used_count"),
        "moe_intermediate_size": keys.require("expert_feed_forward_length"),
    }


def _first(values: list[Any], windows: list[bool], has: bool) -> Any:
    """The value of the first layer that has a window, or of the first that has none."""
    return next((value for value, own in zip(values, windows, strict=True) if own == has), values[0])


GEMMAS = {
    "gemma": Architecture("gemma", _gemma, norm_adds_one=True),
    "gemma2": Architecture("gemma2", _gemma2, _SANDWICH, norm_adds_one=True),
    "gemma3": Architecture("gemma3_text", _gemma3, _SANDWICH, norm_adds_one=True),
    "gemma3n": Architecture("gemma3n_text", _gemma3n, _GEMMA3N, _AROUND_GEMMA3N),
    "gemma4": Architecture("gemma4_text", _gemma4, _GEMMA4, _AROUND_PER_LAYER, own_keys=_GEMMA4_KEYS),
}
"""By `general.architecture`."""
