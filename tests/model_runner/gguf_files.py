"""GGUF files of tiny random models, written by llama.cpp's own library in the way of its converter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests import tiny_vocabulary

Weights = dict[str, np.ndarray]
_CONTROL, _NORMAL = 3, 1
_ARCHITECTURES = {"gemma3_text": "gemma3"}


@dataclass
class Contents:
    """What goes into a file; tests change it."""

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


def contents_of(config: PretrainedConfig, change: Callable[[Any], object] = lambda model: None) -> Contents:
    """A random model of the configuration; `change` is given it before it is written."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval()
    change(model)
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    keys = {f"{architecture}.{key}": value for key, value in _sizes(config).items()}
    return Contents(architecture, {**keys, **vocabulary(config.vocab_size)}, _tensors(model, architecture))


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


def _sizes(config: Any) -> Mapping[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
    }
    if config.model_type == "llama":
        sizes |= {"vocab_size": config.vocab_size, "rope.dimension_count": head_dim}
    if config.model_type == "gemma3_text":
        sizes["attention.sliding_window"] = config.sliding_window
    return sizes


def _tensors(model: Any, architecture: str) -> Weights:
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    tensors = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        stem, _, suffix = name.rpartition(".")
        if architecture == "llama" and ".q_proj" in name:
            weight = _interleaved(weight, model.config.num_attention_heads)
        if architecture == "llama" and ".k_proj" in name:
            weight = _interleaved(weight, model.config.num_key_value_heads)
        if architecture == "gemma3" and "norm" in name:
            weight = weight + 1
        tensors[f"{names.get_name(stem)}.{suffix}"] = weight
    return tensors


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order in which llama.cpp rotates them for this architecture."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


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
