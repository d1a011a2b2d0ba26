"""What transformers reads wrongly of GGUF files, or drops, without a word: refused.

It takes what it knows of a file and leaves out the rest. Here everything in a file that could change an answer is
compared with what became of it: metadata with the configuration, tensors with the model's parameters. A file that says
something that is not known here is refused, too.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from model_runner.models.gguf_file import GgufFile
from model_runner.models.refusal import UnsupportedModelError, few

_27B = {("gemma2", 46), ("gemma3", 62)}
"""Architectures and numbers of layers by which llama.cpp tells the models whose queries it scales in another way."""


def check_head(file: GgufFile) -> None:
    """Raises UnsupportedModelError for what the head of a file rules out."""
    if not file.architecture:
        raise UnsupportedModelError("its metadata names no general.architecture")
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise UnsupportedModelError(f"it holds no model: general.type is {kind}")
    if file.metadata.get("split.count", 1) > 1 or file.metadata.get("split.no", 0) > 0:
        raise UnsupportedModelError(
            f"it is part {file.metadata.get('split.no', 0) + 1} of {file.metadata.get('split.count')} of a model, and "
            "the others would not be read; merge them with llama.cpp's `llama-gguf-split --merge`"
        )
    if names := [name for name in file.tensors if name.startswith("rope_")]:
        raise UnsupportedModelError(f"its rotary positions are scaled by the tensor {few(names)}, which is not read")
    _check_formats(file)


def check_config(file: GgufFile, config: Any) -> None:
    """Raises UnsupportedModelError unless the configuration that transformers made says all that the metadata say."""
    prefix = f"{file.architecture}."
    said = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    if missing := _REQUIRED - said.keys():
        raise UnsupportedModelError(f"its metadata lack {few([prefix + key for key in missing])}")
    for key, value in sorted((_defaults(said) | said).items()):
        became = _HARMLESS[key] if key in _HARMLESS else _READ[key](config) if key in _READ else None
        if not _same(value, became):
            raise UnsupportedModelError(
                f"transformers drops a part of its metadata: {prefix}{key} is {value}, and is read as {became}"
            )
    _check_scale_of_queries(file, config)


def check_tensors(file: GgufFile, used: Collection[str]) -> None:
    """Raises UnsupportedModelError if there are tensors that no parameter was loaded from.

    Args:
        file: that was loaded.
        used: names of tensors that transformers looks for; of stacked experts, without `.weight`.
    """
    if unused := [name for name in file.tensors if name not in used and name.removesuffix(".weight") not in used]:
        raise UnsupportedModelError(f"it has tensors that nothing is loaded from: {few(unused)}")


def _check_formats(file: GgufFile) -> None:
    """Have one block of each format unpacked."""
    import numpy as np  # noqa: PLC0415
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize  # noqa: PLC0415

    for number in set(file.tensors.values()):
        names = [name for name, used in file.tensors.items() if used == number]
        try:
            kind = GGMLQuantizationType(number)
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedModelError(
                f"it has tensors in a block format that is not known ({number}): {few(names)}"
            ) from error


def _same(said: Any, became: Any) -> bool:
    """Whether a value became the same value; zero and None say that there is nothing."""
    if isinstance(said, float) and isinstance(became, int | float):
        return math.isclose(said, became, rel_tol=1e-6)
    return bool(said == became) or (said in (0, None) and said is not False and became in (0, None))


def _defaults(said: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp takes where a file says nothing, and transformers may take something else."""
    heads = said["attention.head_count"]
    return {"rope.freq_base": 10000.0, "attention.head_count_kv": heads, "attention.sliding_window": None}


def _check_scale_of_queries(file: GgufFile, config: Any) -> None:
    scale = getattr(config, "query_pre_attn_scalar", None)
    if (file.architecture, config.num_hidden_layers) in _27B:
        expected = config.hidden_size / config.num_attention_heads
    else:
        expected = _head_dim(config)
    if scale is not None and scale != expected:
        raise UnsupportedModelError(f"its queries are scaled by {expected:g} ** -0.5, and would be by {scale} ** -0.5")


def _head_dim(config: Any) -> int:
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim


def _rope(config: Any, kind: str) -> Mapping[str, Any]:
    """Rotary parameters of layers of a kind, or of all of them where they do not differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    found: Mapping[str, Any] = parameters.get(kind, parameters)
    return found


def _rotated(config: Any) -> int:
    share: float = _rope(config, "full_attention").get("partial_rotary_factor") or 1.0
    return int(_head_dim(config) * share)


def _attribute(*names: str) -> Callable[[Any], Any]:
    """Reads the first of some attributes that a configuration has."""
    return lambda config: next((getattr(config, name) for name in names if hasattr(config, name)), None)


_REQUIRED = {"context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"}
_READ: Mapping[str, Callable[[Any], Any]] = {
    "context_length": _attribute("max_position_embeddings"),
    "embedding_length": _attribute("hidden_size"),
    "block_count": _attribute("num_hidden_layers"),
    "feed_forward_length": _attribute("intermediate_size"),
    "vocab_size": _attribute("vocab_size"),
    "use_parallel_residual": _attribute("use_parallel_residual"),
    "attention.head_count": _attribute("num_attention_heads"),
    "attention.head_count_kv": _attribute("num_key_value_heads"),
    "attention.key_length": _head_dim,
    "attention.value_length": _head_dim,
    "attention.layer_norm_rms_epsilon": _attribute("rms_norm_eps"),
    "attention.layer_norm_epsilon": _attribute("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": _attribute("sliding_window"),
    "attention.sliding_window_pattern": _attribute("_sliding_window_pattern"),
    "attn_logit_softcapping": _attribute("attn_logit_softcapping"),
    "final_logit_softcapping": _attribute("final_logit_softcapping"),
    "rope.freq_base": lambda config: _rope(config, "full_attention").get("rope_theta"),
    "rope.freq_base_swa": lambda config: _rope(config, "sliding_attention").get("rope_theta"),
    "rope.dimension_count": _rotated,
    "expert_count": _attribute("num_experts"),
    "expert_used_count": _attribute("num_experts_per_tok"),
    "expert_feed_forward_length": _attribute("moe_intermediate_size"),
    "expert_shared_feed_forward_length": _attribute("shared_expert_intermediate_size"),
}
"""What each key of the metadata became in a configuration."""
_HARMLESS: Mapping[str, Any] = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scale_linear": 1.0,
    "attention.causal": True,
    "tensor_data_layout": "Meta AI original pth",
    "pooling_type": 3,  # the last token, which is what embeddings are made of where nothing is said
}
"""Keys whose only value that transformers does right is the one that needs nothing done."""
