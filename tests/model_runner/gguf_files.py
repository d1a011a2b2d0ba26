"""GGUF files of tiny random models, written by llama.cpp's own library in the way of its converter."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests import tiny_vocabulary
from tests.model_runner import gguf_keys
from tests.model_runner.gguf_tensors import Weights, tensors_of

_CONTROL, _NORMAL = 3, 1
_ARCHITECTURES = {
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "falcon_h1": "falcon-h1",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "lfm2_moe": "lfm2moe",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}
"""llama.cpp's names, where they differ from transformers'."""


@dataclass
class Contents:
    """The content of a file, for tests to change."""

    architecture: str
    keys: dict[str, Any]
    tensors: Weights
    raw: dict[str, gguf.GGMLQuantizationType] = field(default_factory=dict)
    """Formats of tensors that are bytes."""

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.keys.items():
            _add(writer, key, value)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(tensor), raw_dtype=self.raw.get(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def architecture_name(config: Any) -> str:
    """llama.cpp's name of the architecture of such models."""
    name = _ARCHITECTURES.get(config.model_type, config.model_type)
    return "nemotron_h_moe" if name == "nemotron_h" and "moe" in config.layer_types else str(name)


def contents_of(
    config: PretrainedConfig, change: Callable[[Any], object] = lambda model: None, architecture: str = ""
) -> Contents:
    """A random model of the configuration; `change` is given it before it is written.

    `architecture` is llama.cpp's name if it is not the usual one of the model's type.
    """
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval()
    change(model)
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4's; from here on it is only read
    architecture = architecture or architecture_name(config)
    more = _more(config) | gguf_keys.OWN.get(config.model_type, lambda config: {})(config)
    keys = {f"{architecture}.{key}": value for key, value in (_sizes(config) | more).items() if value is not None}
    return Contents(architecture, {**keys, **vocabulary(config.vocab_size)}, tensors_of(model, architecture))


def vocabulary(size: int, merges: Sequence[str] = ("a b", "ab c"), last: str = "<last>") -> dict[str, Any]:
    """One of bytes; `last` is its last token."""
    tokens = [*tiny_vocabulary.tokens(size - 1), last]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL if token.startswith("<") else _NORMAL for token in tokens],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _sizes(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        **_rotary(rope.get("full_attention", rope), head_dim),
    }
    named = {key: getattr(config, name, None) for key, name in _NAMED.items()}
    return sizes | {key: value for key, value in named.items() if value}


_NAMED = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _rotary(rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    if not rope:
        return {}
    keys = {"rope.freq_base": rope["rope_theta"], **_scaling(rope)}
    if (part := rope.get("partial_rotary_factor")) is not None and rope["rope_type"] == "default":
        keys["rope.dimension_count"] = int(head_dim * part)
    return keys


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] == "longrope":
        attention = math.sqrt(1 + math.log(rope["factor"]) / math.log(rope["original_max_position_embeddings"]))
        return {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.attn_factor": attention,
        }
    if rope["rope_type"] not in ("linear", "yarn"):
        return {}
    keys = {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    original = rope.get("original_max_position_embeddings")
    return keys if original is None else {**keys, "rope.scaling.original_context_length": original}


def _more(config: Any) -> dict[str, Any]:
    """Keys that the converter writes for one kind of model only."""
    if config.model_type in ("qwen2_moe", "qwen3_moe"):
        shared = getattr(config, "shared_expert_intermediate_size", None)
        more = {"expert_count": config.num_experts}
        return more if shared is None else {**more, "expert_shared_feed_forward_length": shared}
    if config.model_type == "dots1":
        more = {"expert_count": config.n_routed_experts, "expert_gating_func": 2}
        return {**more, "expert_weights_norm": config.norm_topk_prob}
    if config.model_type == "granitemoeshared":
        return {"expert_shared_feed_forward_length": config.shared_intermediate_size}
    if config.model_type == "llama":
        return {"vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}
    return {}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def random_blocks(kind: str, rows: int, width: int, seed: int) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """Blocks [rows, bytes of a row] whose weights have a deviation of about 1 / sqrt(width)."""
    block_format = gguf.GGMLQuantizationType[kind]
    generator = np.random.default_rng(seed)
    if kind in ("F16", "BF16"):
        weights = (generator.standard_normal((rows, width)) * width**-0.5).astype(np.float32)
        return gguf.quantize(weights, block_format), block_format
    weights, num_bytes = gguf.GGML_QUANT_SIZES[block_format]
    blocks = generator.integers(0, 256, (rows * width // weights, num_bytes), np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 120
    for at in _HALVES.get(kind, ()):
        blocks[:, at : at + 2] = np.float16(1e-3).view(np.uint16).reshape(1).view(np.uint8)
    blocks = blocks.reshape(rows, -1)
    spread = float(gguf.dequantize(blocks, block_format).std())
    if kind in _HALVES:
        scale = np.float16(1e-3 * width**-0.5 / spread).view(np.uint16).reshape(1).view(np.uint8)
        for at in _HALVES[kind]:
            blocks.reshape(-1, num_bytes)[:, at : at + 2] = scale
    return blocks, block_format


_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_S", "IQ2_XS", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    "TQ2_0": (64,),
}
"""Places of the scales and minimums in half precision."""


def in_blocks(formats: Mapping[str, str]) -> Callable[[Contents], None]:
    """Replace tensors by random blocks, by the stems of their names."""

    def change(contents: Contents) -> None:
        for number, (name, tensor) in enumerate(contents.tensors.items()):
            if (kind := formats.get(name.split(".")[-2])) is None or not name.endswith("weight"):
                continue
            rows, width = int(np.prod(tensor.shape[:-1])), tensor.shape[-1]
            blocks, contents.raw[name] = random_blocks(kind, rows, width, number)
            contents.tensors[name] = blocks.reshape(*tensor.shape[:-1], -1)

    return change
