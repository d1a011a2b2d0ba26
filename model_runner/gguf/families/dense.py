"""Architectures of GGUF files whose layers have attention and one MLP."""

import numpy as np

from model_runner.gguf.base_config import layer_types, window_pattern
from model_runner.gguf.layout import PAIRS, Architecture
from model_runner.gguf.metadata import Config, Metadata


def _llama(keys: Metadata, base: Config) -> Config:
    """Llama, or Mistral or Mixtral, whose files have the same name."""
    if window := keys.get("attention.sliding_window"):
        return {"model_type": "mistral", "sliding_window": window}
    if count := keys.get("expert_count"):
        used = keys.require("expert_used_count")
        return {"model_type": "mixtral", "num_local_experts": count, "num_experts_per_tok": used}
    keys.expect("expert_used_count", 0)
    return {}


def _mistral3(keys: Metadata, base: Config) -> Config:
    """Ministral 3, whose queries are scaled by their positions, or the text of Mistral Small 3.1."""
    beta = keys.get("attention.temperature_scale")
    if beta is None:
        return {"model_type": "mistral", "sliding_window": None}
    keys.expect("rope.scaling.type", "yarn")
    scale = keys.require("rope.scaling.yarn_log_multiplier")
    rope = latent_yarn(base["rope_parameters"], scale) | {"llama_4_scaling_beta": beta}
    return {"rope_parameters": rope, "sliding_window": None}


def latent_yarn(rope: Config, scale: float) -> Config:
    """YaRN whose factor on queries and keys moves from cos and sin, where it is 1, to the attention's scale."""
    kept = {name: value for name, value in rope.items() if name != "attention_factor"}
    return kept | {"mscale": scale, "mscale_all_dim": scale}


def without_images(config: Config, keys: Metadata) -> Config:
    """The configuration of a model's text, which counts positions as a model without images does."""
    keys.get("rope.dimension_sections")
    keys.get("n_deepstack_layers")
    return config


def _phi3(keys: Metadata, base: Config) -> Config:
    return {
        "sliding_window": keys.get("attention.sliding_window") or None,
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length")
        or base["max_position_embeddings"],
    }


def _granite(keys: Metadata, base: Config) -> Config:
    keys.expect("expert_count", 0)
    keys.expect("expert_used_count", 0)
    width = keys.get("expert_shared_feed_forward_length") or base["intermediate_size"]
    without_recurrences(keys)
    return granite_scales(keys, base) | {"intermediate_size": width}


def without_recurrences(keys: Metadata) -> None:
    """Read the sizes of recurrences, which Granite 4's converter writes for models that have none, too."""
    if not keys.has_tensor("ssm_in.weight"):
        for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
            keys.get(f"ssm.{name}")


def granite_scales(keys: Metadata, base: Config) -> Config:
    """The factors of every Granite."""
    return {
        "logits_scaling": keys.require("logit_scale"),
        "residual_multiplier": keys.get("residual_scale") or 1.0,
        "embedding_multiplier": keys.get("embedding_scale") or 1.0,
        "attention_multiplier": keys.get("attention.scale") or base["head_dim"] ** -0.5,
    }


def _smollm3(keys: Metadata, base: Config) -> Config:
    layers = base["num_hidden_layers"]
    return {
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
        "layer_types": layer_types([False] * layers),
        "use_sliding_window": False,
    }


def _exaone4(keys: Metadata, base: Config) -> Config:
    large = base["num_hidden_layers"] == 64  # llama.cpp knows the model with windows by this
    window = keys.get("attention.sliding_window", 4096 if large else None)
    if not window:
        return {"sliding_window": None, "layer_types": layer_types([False] * base["num_hidden_layers"])}
    keys.expect("rope.freq_base_swa", base["rope_parameters"]["rope_theta"])
    pattern = window_pattern(keys, base, period=4)
    return {"sliding_window": window, "layer_types": layer_types(pattern)}


def _olmo2(keys: Metadata, base: Config) -> Config:
    """OLMo 2, or OLMo 3, which has windows, and scales rotary positions only where a layer has none."""
    window = keys.get("attention.sliding_window")
    if not window:
        return {}
    rope = base["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    keys.expect("rope.freq_base_swa", rope["rope_theta"])
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(window_pattern(keys, base, period=4)),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _starcoder2(keys: Metadata, base: Config) -> Config:
    return {
        "norm_epsilon": keys.require("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "sliding_window": keys.get("attention.sliding_window"),
    }


def _ernie(keys: Metadata, base: Config) -> Config:
    return {"use_bias": keys.has_tensor("attn_q.bias")}


def _nemotron(keys: Metadata, base: Config) -> Config:
    return {
        "norm_eps": keys.require("attention.layer_norm_epsilon"),
        "hidden_act": "relu2",
    }


def _olmo(keys: Metadata, base: Config) -> Config:
    keys.expect("attention.layer_norm_epsilon", float(np.float32(1e-5)))
    return {"clip_qkv": keys.get("attention.clamp_kqv") or None}


def _stablelm(keys: Metadata, base: Config) -> Config:
    keys.get("use_parallel_residual")  # llama.cpp sees it from the norms
    return {
        "layer_norm_eps": keys.require("attention.layer_norm_epsilon"),
        "use_qkv_bias": keys.has_tensor("attn_q.bias"),
        "qk_layernorm": keys.has_tensor("attn_q_norm.weight"),
        "use_parallel_residual": not keys.has_tensor("ffn_norm.weight"),
    }


def _command_r(keys: Metadata, base: Config) -> Config:
    return {
        "layer_norm_eps": keys.require("attention.layer_norm_epsilon"),
        "logit_scale": keys.require("logit_scale"),
        "use_qk_norm": keys.has_tensor("attn_q_norm.weight"),
    }


def _cohere2(keys: Metadata, base: Config) -> Config:
    config = _command_r(keys, base) | {"sliding_window": keys.require("attention.sliding_window")}
    del config["use_qk_norm"]
    return config | {"layer_types": layer_types(window_pattern(keys, base, period=4))}


_QWEN: Config = {"use_sliding_window": False}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_STABLELM = {
    "attn_q_norm.weight": "self_attn.q_layernorm.norms.{}.weight",
    "attn_k_norm.weight": "self_attn.k_layernorm.norms.{}.weight",
}
HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}

DENSE = {
    "arcee": Architecture("arcee", {"hidden_act": "relu2"}, changes=PAIRS),
    "cohere2": Architecture("cohere2", _cohere2),
    "command-r": Architecture("cohere", _command_r),
    "ernie4_5": Architecture("ernie4_5", _ernie),
    "exaone4": Architecture("exaone4", _exaone4),
    "glm4": Architecture("glm4", names=_GLM4),
    "granite": Architecture("granite", _granite, changes=PAIRS, some_layers=True),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", names=HUNYUAN),
    "llama": Architecture("llama", _llama, changes=PAIRS),
    "mistral3": Architecture("ministral3", _mistral3, changes=PAIRS),
    "nemotron": Architecture("nemotron", _nemotron, norm_adds_one=True),
    "olmo": Architecture("olmo", _olmo, changes=PAIRS),
    "olmo2": Architecture("olmo2", _olmo2),
    "phi3": Architecture("phi3", _phi3, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "qwen2": Architecture("qwen2", _QWEN),
    "qwen2vl": Architecture("qwen2", lambda keys, base: without_images(_QWEN, keys)),
    "qwen3": Architecture("qwen3", _QWEN),
    "qwen3vl": Architecture("qwen3", lambda keys, base: without_images(_QWEN, keys)),
    "seed_oss": Architecture("seed_oss", {"attention_out_bias": False}),
    "smollm3": Architecture("smollm3", _smollm3, changes=PAIRS),
    "stablelm": Architecture("stablelm", _stablelm, _STABLELM),
    "starcoder2": Architecture("starcoder2", _starcoder2, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}
"""By `general.architecture`."""
