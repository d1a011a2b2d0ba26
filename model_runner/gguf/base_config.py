"""The part of a configuration that most architectures of GGUF files share: sizes, and rotary positions."""

import math

import numpy as np

from model_runner.gguf.header import GgufFile
from model_runner.gguf.layout import Architecture
from model_runner.gguf.metadata import Config, Metadata
from model_runner.gguf.weights import Array, read_tensor
from model_runner.refusal import UnsupportedModelError

_ROPE_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
IN_CONFIG = {_ROPE_FACTORS, _SHORT_FACTORS, _LONG_FACTORS}
"""Tensors that become a part of the configuration."""
_UNROTATED = 1e9
"""Frequencies divided by more than this turn no pair of dimensions."""


def base_config(keys: Metadata, file: GgufFile, architecture: Architecture) -> Config:
    """The configuration that most architectures share, with the entries of a Llama.

    Args:
        keys: the metadata.
        file: the file.
        architecture: how the file's architecture is read.

    Raises:
        UnsupportedModelError: if metadata are missing or say something that no configuration can express.
    """
    keys.require("attention.head_count")
    heads = keys.same_in_layers("attention.head_count")
    hidden = keys.require("embedding_length")
    head_dim = keys.get("attention.key_length", hidden // heads)
    keys.expect("attention.causal", True)
    context = keys.require("context_length")
    rotated = keys.get("rope.dimension_count", head_dim)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UnsupportedModelError("it has no embedding: the tensor token_embd.weight is missing or is no matrix")
    config: Config = {
        "hidden_size": hidden,
        "num_hidden_layers": keys.require("block_count") - keys.get("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(keys, file, rotated, context),
        "hidden_act": "silu",
        "attention_bias": keys.has_tensor("attn_q.bias"),
        "mlp_bias": keys.has_tensor("ffn_up.bias"),
    }
    some_layers = architecture.some_layers
    if "feed_forward_length" not in architecture.own_keys:
        config["intermediate_size"] = _intermediate_size(keys, some_layers=some_layers)
    if (key := "attention.head_count_kv") not in architecture.own_keys:
        config["num_key_value_heads"] = keys.same_in_layers(key, heads, some_layers=some_layers)
    if (epsilon := keys.get("attention.layer_norm_rms_epsilon")) is not None:
        config["rms_norm_eps"] = epsilon
    if rotated != head_dim:
        config["rope_parameters"]["partial_rotary_factor"] = rotated / head_dim
    return config


def _intermediate_size(keys: Metadata, *, some_layers: bool) -> int:
    """Width of the MLPs; of an expert if all layers have experts, and the file says no more."""
    key = "feed_forward_length"
    if key not in keys and "expert_feed_forward_length" in keys:
        key = "expert_feed_forward_length"
    value = keys.require(key, some_layers=some_layers)
    return int(keys.same_in_layers(key, value, some_layers=some_layers))


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
        return rope | _from_factors(factors, theta, rotated)
    if not file.tensors.keys().isdisjoint((_SHORT_FACTORS, _LONG_FACTORS)) and kind in ("none", "longrope"):
        return rope | _long_rope(keys, file, rotated, original)
    if kind == "linear" and factor != 1:
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return rope | _yarn(keys, factor, original)
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(f"rotary scaling of type {kind} is not supported")
    return rope


def local_rope(keys: Metadata, theta: float = 10000.0) -> Config:
    """Rotary parameters of layers with windows; llama.cpp takes `theta` where a file names no other."""
    return {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", theta)}


def _read_factors(file: GgufFile, name: str) -> Array | None:
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


def _from_factors(factors: Array, theta: float, rotated: int) -> Config:
    """The scaling that divides frequencies by these factors: Gemma 4's or Llama 3.1's.

    Raises:
        UnsupportedModelError: if no such scaling gives these factors.
    """
    if factors.shape != (rotated // 2,):
        raise UnsupportedModelError(f"{_ROPE_FACTORS} has the shape {list(factors.shape)}, not [{rotated // 2}]")
    if (factors == 1).all():
        return {}
    turning = int((factors == 1).sum())
    if (factors[turning:] > _UNROTATED).all():  # the first pairs turn, and all others do not
        return {"rope_type": "proportional", "partial_rotary_factor": 2 * turning / rotated}
    return _llama3(factors, theta, rotated)


def _llama3(factors: Array, theta: float, rotated: int) -> Config:
    """The scaling of Llama 3.1, found from the factors that its frequencies are divided by."""
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


def window_pattern(keys: Metadata, base: Config, period: int) -> list[bool]:
    """Whether each layer has a window: the last one of each period has none, unless the file says otherwise."""
    layers = base["num_hidden_layers"]
    pattern = keys.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) < layers:
            raise UnsupportedModelError(f"its pattern of windows has {len(pattern)} entries for {layers} layers")
        return [bool(has) for has in pattern[:layers]]
    return [(layer + 1) % pattern != 0 for layer in range(layers)]


def layer_types(windows: list[bool]) -> list[str]:
    """The kinds of layers, by whether each has a window."""
    return ["sliding_attention" if has else "full_attention" for has in windows]
