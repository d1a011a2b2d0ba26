"""Architectures of GGUF files: from metadata and names of tensors to a configuration and parameters of transformers.

A row of the table says what the metadata do not: the type of the model, names that differ from Llama's, how rows and
norms are stored. Every key of the metadata that belongs to the architecture must be read, and every tensor used;
anything else is an error, since it would be dropped in silence. What llama.cpp takes where a key is missing, and what
its converter changes in tensors, was looked up in its source.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from model_runner.gguf.header import GgufFile
from model_runner.gguf.weights import Parameter, Source, read_tensor
from model_runner.models.refusal import UnsupportedModelError, few

Config = dict[str, Any]

_MEANINGLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type"}
"""Keys without a meaning for generation; the vocabulary has as many tokens as the embedding has rows."""


class Metadata:
    """The keys of a file's architecture, of which it is known which were read."""

    def __init__(self, file: GgufFile) -> None:
        self._prefix = f"{file.architecture}."
        self._values = {
            key.removeprefix(self._prefix): value
            for key, value in file.metadata.items()
            if key.startswith(self._prefix)
        }
        self._read = set(_MEANINGLESS)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or what llama.cpp takes where it is missing."""
        self._read.add(key)
        return self._values.get(key, default)

    def require(self, key: str) -> Any:
        """A positive number, or one for each layer. Raises UnsupportedModelError if it is missing or something else."""
        value = self.get(key)
        if value is None:
            raise UnsupportedModelError(f"its metadata lack {self._prefix}{key}")
        for number in value if isinstance(value, list) and value else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
                raise UnsupportedModelError(f"its {self._prefix}{key} is {number!r}; a positive number is needed")
        return value

    def same_in_layers(self, key: str, default: Any = None) -> Any:
        """The value of a key that may have one for each layer. Raises UnsupportedModelError if these differ."""
        value = self.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModelError(f"its layers differ in {self._prefix}{key}: {value[:8]} ...")
            return value[0]
        return value

    def expect(self, key: str, value: Any) -> None:
        """Raises UnsupportedModelError if a key has another value; it may be missing."""
        found = self.get(key, value)
        if found != value:
            raise UnsupportedModelError(f"its {self._prefix}{key} is {found}; only {value} is supported")

    def check_all_read(self) -> None:
        """Raises UnsupportedModelError if there are keys that nothing was made of."""
        if unread := {self._prefix + key for key in self._values.keys() - self._read}:
            raise UnsupportedModelError(
                f"its metadata have keys that this server does not know for a {self._prefix[:-1]} model: {few(unread)}"
            )


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one architecture are read; the defaults are Llama's."""

    model_type: str
    model_class: str
    config: Callable[[Metadata, Config], Config] = lambda keys, base: {}
    """Takes the metadata and the base configuration; returns the entries to add or replace."""
    names: dict[str, str] = field(default_factory=dict)
    """Names in a layer that differ from `_LAYER`, or are added to it."""
    pairs: bool = False
    """Rows of queries and keys are stored as neighbouring pairs."""
    norm_adds_one: bool = False
    """Norms are stored as 1 + weight."""


_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
"""Paths below a layer; two tensors with the same path are its rows, one after the other."""
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
_WITHOUT_SUFFIX = (*_EXPERTS, ".e_score_correction_bias", ".sinks")
"""Ends of paths that are parameters, and not modules with a weight."""
_AROUND = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_IN_CONFIG = {_ROPE_FACTORS, _SHORT_FACTORS, _LONG_FACTORS}
"""Tensors that become a part of the configuration."""
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GRANITE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_up_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.down_proj",
}
_SHARED_MLP = {
    "ffn_gate_shexp": "shared_mlp.input_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}


# -- configurations ----------------------------------------------------------------------------------------------------


def _base(keys: Metadata, file: GgufFile) -> Config:
    """The configuration that most architectures share."""
    keys.require("attention.head_count")
    heads = keys.same_in_layers("attention.head_count")
    hidden = keys.require("embedding_length")
    head_dim = keys.get("attention.key_length", hidden // heads)
    keys.expect("attention.value_length", head_dim)
    keys.expect("attention.causal", True)
    context = keys.require("context_length")
    rotated = keys.get("rope.dimension_count", head_dim)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UnsupportedModelError("it has no embedding: the tensor token_embd.weight is missing or is no matrix")
    config: Config = {
        "hidden_size": hidden,
        "num_hidden_layers": keys.require("block_count"),
        "intermediate_size": keys.same_in_layers("feed_forward_length", keys.require("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.same_in_layers("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(keys, file, rotated, context),
        "hidden_act": "silu",
    }
    if (epsilon := keys.get("attention.layer_norm_rms_epsilon")) is not None:
        config["rms_norm_eps"] = epsilon
    if rotated != head_dim:
        config["rope_parameters"]["partial_rotary_factor"] = rotated / head_dim
    return config


def _rope(keys: Metadata, file: GgufFile, rotated: int, context: int) -> Config:
    """Rotary parameters, of all layers or of those that see everything."""
    factors = _read_factors(file, _ROPE_FACTORS)
    theta = keys.get("rope.freq_base", 10000.0)
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0)) or 1.0
    kind = keys.get("rope.scaling.type", "linear" if factor != 1 else "none")
    original = keys.get("rope.scaling.original_context_length", context)
    rope: Config = {"rope_theta": theta, "rope_type": "default"}
    if factors is not None:
        if kind != "none":
            raise UnsupportedModelError(f"its rotary positions are scaled twice: by {kind} and by {_ROPE_FACTORS}")
        return rope | _llama3(factors, theta, rotated)
    if not file.tensors.keys().isdisjoint((_SHORT_FACTORS, _LONG_FACTORS)) and kind in ("none", "longrope"):
        return rope | _long_rope(keys, file, rotated, original)
    if kind == "linear" and factor != 1:
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return rope | _yarn(keys, factor, original)
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(f"rotary scaling of type {kind} is not supported")
    return rope


def _read_factors(file: GgufFile, name: str) -> np.ndarray | None:
    return read_tensor(file.tensors[name]) if name in file.tensors else None


def _long_rope(keys: Metadata, file: GgufFile, rotated: int, original: int) -> Config:
    """LongRoPE (arXiv:2402.13753), with one factor for each pair of dimensions."""
    short, long = (_read_factors(file, name) for name in (_SHORT_FACTORS, _LONG_FACTORS))
    if short is None or long is None or short.shape != (rotated // 2,) or long.shape != short.shape:
        names = f"{_SHORT_FACTORS} and {_LONG_FACTORS}"
        raise UnsupportedModelError(f"one of {names} is missing, or does not have the shape [{rotated // 2}]")
    rope = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
    }
    attention = keys.get("rope.scaling.attn_factor")
    return rope if attention is None else rope | {"attention_factor": attention}


def _yarn(keys: Metadata, factor: float, original: int) -> Config:
    """YaRN (arXiv:2309.00071). Older converters left `yarn_` out of the names of keys."""
    keys.expect("rope.scaling.yarn_ext_factor", 1.0)
    attention = keys.get("rope.scaling.yarn_attn_factor", keys.get("rope.scaling.attn_factor", 1.0))
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow", 1.0),
        "attention_factor": attention * (0.1 * math.log(factor) + 1.0),
    }


def _llama3(factors: np.ndarray, theta: float, rotated: int) -> Config:
    """The scaling of Llama 3.1, found from the factors that its frequencies are divided by.

    Raises:
        UnsupportedModelError: if no such scaling gives these factors.
    """
    if factors.shape != (rotated // 2,):
        raise UnsupportedModelError(f"{_ROPE_FACTORS} has the shape {list(factors.shape)}, not [{rotated // 2}]")
    if (factors == 1).all():
        return {}
    wavelengths = 2 * math.pi * theta ** (np.arange(0, rotated, 2) / rotated)
    factor, low, high = float(factors.max()), 1.0, 4.0
    for original in (1 << bits for bits in range(8, 24)):
        smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModelError(f"the factors in {_ROPE_FACTORS} are not those of Llama 3's scaling")


def _llama(keys: Metadata, base: Config) -> Config:
    config: Config = {"attention_bias": False, "mlp_bias": False}
    if window := keys.get("attention.sliding_window"):
        return config | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    if count := keys.get("expert_count"):
        config |= {"num_local_experts": count, "num_experts_per_tok": keys.require("expert_used_count")}
        return config | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    keys.expect("expert_used_count", 0)
    return config


def _qwen2(keys: Metadata, base: Config) -> Config:
    return {"use_sliding_window": False}


def _qwen3(keys: Metadata, base: Config) -> Config:
    return {"use_sliding_window": False, "attention_bias": False}


def _qwen_experts(keys: Metadata, *, normalises: bool) -> Config:
    return {
        "num_experts": keys.require("expert_count"),
        "num_experts_per_tok": keys.require("expert_used_count"),
        "moe_intermediate_size": keys.require("expert_feed_forward_length"),
        "norm_topk_prob": keys.get("expert_weights_norm", normalises),
        "use_sliding_window": False,
    }


def _qwen2_experts(keys: Metadata, base: Config) -> Config:
    shared = keys.require("expert_shared_feed_forward_length")
    return _qwen_experts(keys, normalises=False) | {"shared_expert_intermediate_size": shared}


def _qwen3_experts(keys: Metadata, base: Config) -> Config:
    return _qwen_experts(keys, normalises=True) | {"attention_bias": False}


def _gemma(keys: Metadata, base: Config) -> Config:
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "attention_bias": False}


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
        "layer_types": _layer_types([layer % 2 == 0 for layer in range(layers)]),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Metadata, base: Config) -> Config:
    window = keys.get("attention.sliding_window", 0)
    pattern = _window_pattern(keys, base, period=6) if window else [False] * base["num_hidden_layers"]
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10000.0)}
    return _gemma(keys, base) | {
        "query_pre_attn_scalar": _scale_of_queries(base, large=62),
        "sliding_window": window or base["max_position_embeddings"],
        "layer_types": _layer_types(pattern),
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
        "attn_logit_softcapping": None,
        "rope_parameters": {"full_attention": base["rope_parameters"], "sliding_attention": local},
    }


def _window_pattern(keys: Metadata, base: Config, period: int) -> list[bool]:
    """Whether each layer has a window: the last one of each period has none, unless the file says otherwise."""
    layers = base["num_hidden_layers"]
    pattern = keys.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise UnsupportedModelError(f"its pattern of windows has {len(pattern)} entries for {layers} layers")
        return [bool(has) for has in pattern]
    return [(layer + 1) % pattern != 0 for layer in range(layers)]


def _layer_types(windows: list[bool]) -> list[str]:
    return ["sliding_attention" if has else "full_attention" for has in windows]


def _phi3(keys: Metadata, base: Config) -> Config:
    return {
        "sliding_window": keys.get("attention.sliding_window") or None,
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length")
        or base["max_position_embeddings"],
    }


def _granite(keys: Metadata, base: Config) -> Config:
    keys.expect("expert_count", 0)
    keys.expect("expert_used_count", 0)
    return _granite_scales(keys, base) | {"mlp_bias": False}


def _granite_experts(keys: Metadata, base: Config) -> Config:
    keys.get("expert_feed_forward_length")  # the same as feed_forward_length
    return _granite_scales(keys, base) | {
        "num_local_experts": keys.require("expert_count"),
        "num_experts_per_tok": keys.require("expert_used_count"),
        "shared_intermediate_size": keys.get("expert_shared_feed_forward_length", 0),
    }


def _granite_scales(keys: Metadata, base: Config) -> Config:
    return {
        "attention_bias": False,
        "logits_scaling": keys.require("logit_scale"),
        "residual_multiplier": keys.get("residual_scale") or 1.0,
        "embedding_multiplier": keys.get("embedding_scale") or 1.0,
        "attention_multiplier": keys.get("attention.scale") or base["head_dim"] ** -0.5,
    }


def _smollm3(keys: Metadata, base: Config) -> Config:
    layers = base["num_hidden_layers"]
    return {
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
        "layer_types": _layer_types([False] * layers),
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }


def _exaone4(keys: Metadata, base: Config) -> Config:
    large = base["num_hidden_layers"] == 64  # llama.cpp knows the model with windows by this
    window = keys.get("attention.sliding_window", 4096 if large else None)
    if not window:
        return {"sliding_window": None, "layer_types": _layer_types([False] * base["num_hidden_layers"])}
    keys.expect("rope.freq_base_swa", base["rope_parameters"]["rope_theta"])
    pattern = _window_pattern(keys, base, period=4)
    return {"sliding_window": window, "layer_types": _layer_types(pattern)}


def _seed_oss(keys: Metadata, base: Config) -> Config:
    return {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}


def _dots1(keys: Metadata, base: Config) -> Config:
    keys.expect("expert_gating_func", 2)  # sigmoid
    keys.expect("expert_group_count", 1)
    keys.expect("expert_group_used_count", 1)
    layers = base["num_hidden_layers"]
    return {
        "attention_bias": False,
        "n_routed_experts": keys.require("expert_count"),
        "num_experts_per_tok": keys.require("expert_used_count"),
        "moe_intermediate_size": keys.require("expert_feed_forward_length"),
        "n_shared_experts": keys.require("expert_shared_count"),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm", False),
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": None,
        "layer_types": _layer_types([False] * layers),
    }


def _gpt_oss(keys: Metadata, base: Config) -> Config:
    keys.expect("rope.freq_base_swa", base["rope_parameters"]["rope_theta"])
    if base["rope_parameters"]["rope_type"] == "yarn":  # files do not say that its bounds are no whole dimensions
        base["rope_parameters"]["truncate"] = False
    return {
        "attention_bias": True,
        "intermediate_size": keys.get("expert_feed_forward_length", base["intermediate_size"]),
        "num_local_experts": keys.require("expert_count"),
        "num_experts_per_tok": keys.require("expert_used_count"),
        "sliding_window": keys.require("attention.sliding_window"),
        "layer_types": _layer_types([layer % 2 == 0 for layer in range(base["num_hidden_layers"])]),
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


def _starcoder2(keys: Metadata, base: Config) -> Config:
    return {
        "norm_epsilon": keys.require("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "sliding_window": keys.get("attention.sliding_window"),
    }


_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}

_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "dots1": Architecture("dots1", "Dots1ForCausalLM", _dots1, _SHARED_EXPERTS),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", _exaone4, _POST_NORMS),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma, norm_adds_one=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, _SANDWICH, norm_adds_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, _SANDWICH, norm_adds_one=True),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _gpt_oss, _GPT_OSS),
    "granite": Architecture("granite", "GraniteForCausalLM", _granite, pairs=True),
    "granitemoe": Architecture(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", _granite_experts, _GRANITE_EXPERTS | _SHARED_MLP, pairs=True
    ),
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, pairs=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", names=_POST_NORMS),
    "phi3": Architecture(
        "phi3", "Phi3ForCausalLM", _phi3, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_experts, _SHARED_EXPERT),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_experts),
    "seed_oss": Architecture(
        "seed_oss", "SeedOssForCausalLM", _seed_oss, {"post_attention_norm": "post_attention_layernorm"}
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3, pairs=True),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", _starcoder2, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
}
"""By `general.architecture`."""


# -- reading -----------------------------------------------------------------------------------------------------------


def architecture_of(file: GgufFile) -> Architecture:
    """The row of the table. Raises UnsupportedModelError if there is none."""
    if file.architecture == "clip":
        raise UnsupportedModelError(
            "it holds the vision part of a model (general.architecture is clip); serve the file with the language model"
        )
    if not file.architecture:
        raise UnsupportedModelError("its metadata name no general.architecture")
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF files of the architecture {file.architecture} cannot be read; these can: "
            f"{', '.join(sorted(ARCHITECTURES))}. If its original checkpoint in safetensors is supported, serve that"
        )
    return ARCHITECTURES[file.architecture]


def read_config(file: GgufFile) -> Config:
    """The content of config.json.

    Raises:
        UnsupportedModelError: if the file is of an unknown architecture, lacks metadata, or says something that no
            configuration can express.
    """
    architecture = architecture_of(file)
    keys = Metadata(file)
    base = _base(keys, file)
    own = {"model_type": architecture.model_type, "architectures": [architecture.model_class]}
    config = base | own | architecture.config(keys, base)
    keys.check_all_read()
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def read_parameters(file: GgufFile, config: Config) -> dict[str, Parameter]:
    """The parameters that the tensors become, by their names in transformers.

    Raises:
        UnsupportedModelError: if there is a tensor that nothing is made of.
    """
    architecture = architecture_of(file)
    sources: dict[str, list[Source]] = {}
    unused = []
    for name in sorted(file.tensors, key=_gate_first):
        path = _path(name, architecture)
        if path is not None:
            sources.setdefault(path, []).append(_source(name, path, architecture, config))
        elif name not in _IN_CONFIG:
            unused.append(name)
    if unused:
        raise UnsupportedModelError(f"it has tensors that nothing is loaded from: {few(unused)}")
    return {path: Parameter(tuple(parts), _shape(file, path, parts)) for path, parts in sources.items()}


def _gate_first(name: str) -> tuple[str, str]:
    """Sorts the gate before the up projection: its rows come first where both make one parameter."""
    layer, _, stem = name.rpartition(".ffn_")
    return layer, stem


def _path(name: str, architecture: Architecture) -> str | None:
    """The name of the parameter that a tensor belongs to; None if there is none."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    if stem in _AROUND:
        return f"{_AROUND[stem]}.{suffix}"
    block, _, rest = stem.partition(".")
    layer, _, stem = rest.partition(".")
    path = (_LAYER | architecture.names).get(stem)
    if block != "blk" or not layer.isdecimal() or path is None:
        return None
    name = f"model.layers.{layer}.{path}"
    if suffix == "bias" and path.endswith(_EXPERTS):
        return f"{name}_bias"
    return name if path.endswith(_WITHOUT_SUFFIX) else f"{name}.{suffix}"


def _source(name: str, path: str, architecture: Architecture, config: Config) -> Source:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(path.split(".")[-2])
    is_norm = path.endswith("norm.weight")
    return Source(
        name,
        halves=config[heads] if architecture.pairs and heads else 0,
        minus_one=architecture.norm_adds_one and is_norm,
    )


def _shape(file: GgufFile, path: str, parts: list[Source]) -> tuple[int, ...]:
    """The shape of a parameter: rows of all its tensors together."""
    shapes = [file.tensors[part.name].shape for part in parts]
    first = shapes[0]
    if path.endswith("_proj_bias") and all(len(shape) == 2 and shape[0] == first[0] for shape in shapes):
        return first[0], sum(shape[1] for shape in shapes)
    if any(len(shape) < 2 or shape[:-2] + shape[-1:] != first[:-2] + first[-1:] for shape in shapes[1:]):
        raise UnsupportedModelError(f"its tensors for {path} have shapes that do not fit: {shapes}")
    if len(shapes) > 1:
        return (*first[:-2], sum(shape[-2] for shape in shapes), first[-1])
    # Files have this matrix without its only row's dimension.
    return (1, *first) if path.endswith("shared_expert_gate.weight") and len(first) == 1 else first
