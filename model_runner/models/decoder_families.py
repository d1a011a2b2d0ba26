"""Which decoder layers of transformers belong to the common family, and how each of them is read.

A layer is in the table if all it computes is: RMSNorm, attention with rotary positions (each pair of rotated dimensions
half of them apart) and grouped heads, RMSNorm, gated MLP, with the variations that `Family` names. Families with other
norms, interleaved rotary positions, norms over all heads at once, gates on the attention, attention sinks, queries
scaled by position or experts are not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any


@dataclass(frozen=True, slots=True)
class NormNames:
    """Where a layer keeps its RMS norms; None where it has none. The defaults are Llama's."""

    attention: str | None = "input_layernorm"
    """On the attention's input."""
    attention_post: str | None = None
    """On the attention's output, before it is added to the residual."""
    mlp: str | None = "post_attention_layernorm"
    """On the MLP's input."""
    mlp_post: str | None = None
    """On the MLP's output, before it is added to the residual."""
    query: str | None = None
    """On each head of the queries, before the rotation."""
    key: str | None = None
    """On each head of the keys, before the rotation."""


@dataclass(frozen=True, slots=True)
class Family:
    """How the layers of a family are read. Names are paths below the layer, functions take it; defaults are Llama's."""

    norms: NormNames = NormNames()
    norm_adds_one: bool = False
    """The factor of a norm is 1 + its weight."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Queries, keys and values, or all in one."""
    attention_output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up, or both in one."""
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    window: Callable[[Any], int | None] = lambda layer: None
    softcap: Callable[[Any], float | None] = lambda layer: None
    uses_rotary: Callable[[Any], bool] = lambda layer: True
    residual_scale: Callable[[Any], float] = lambda layer: 1.0
    is_dense: Callable[[Any], bool] = lambda layer: True
    """False for layers of the same class that are something else."""


_layer_window = attrgetter("self_attn.sliding_window")
_model_window = attrgetter("self_attn.config.sliding_window")
_softcap = attrgetter("self_attn.attn_logit_softcapping")
_residual_multiplier = attrgetter("residual_multiplier")

_HEAD_NORMS = NormNames(query="self_attn.q_norm", key="self_attn.k_norm")
_SANDWICH_NORMS = NormNames(
    attention_post="post_attention_layernorm", mlp="pre_feedforward_layernorm", mlp_post="post_feedforward_layernorm"
)
_HEAD_AND_SANDWICH_NORMS = NormNames(
    attention_post="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_post="post_feedforward_layernorm",
    query="self_attn.q_norm",
    key="self_attn.k_norm",
)
_HEAD_AND_POST_NORMS = NormNames(
    attention=None,
    attention_post="post_attention_layernorm",
    mlp=None,
    mlp_post="post_feedforward_layernorm",
    query="self_attn.q_norm",
    key="self_attn.k_norm",
)

_LLAMA = Family()
_PHI3 = Family(
    qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",), activation="mlp.activation_fn", window=_model_window
)
_GRANITE_HYBRID = Family(
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    activation="shared_mlp.activation",
    uses_rotary=lambda layer: layer.self_attn.config.position_embedding_type == "rope",
    residual_scale=_residual_multiplier,
    is_dense=lambda layer: layer.self_attn is not None and not layer.has_experts,
)
_EXAONE4 = Family(
    norms=_HEAD_AND_POST_NORMS,
    window=lambda layer: layer.self_attn.sliding_window if layer.self_attn.is_sliding else None,
    # Of a model with windows, the layers that see everything have no positions.
    uses_rotary=lambda layer: layer.self_attn.sliding_window is None or layer.self_attn.is_sliding,
)


def _layer(model: str, prefix: str) -> str:
    """The full name of a decoder layer's class."""
    return f"transformers.models.{model}.modeling_{model}.{prefix}DecoderLayer"


FAMILIES = {
    _layer("cwm", "Cwm"): Family(window=_layer_window),
    _layer("emu3", "Emu3"): _LLAMA,
    _layer("exaone4", "Exaone4"): _EXAONE4,
    _layer("gemma", "Gemma"): Family(norm_adds_one=True),
    _layer("gemma2", "Gemma2"): Family(
        norms=_SANDWICH_NORMS, norm_adds_one=True, window=_layer_window, softcap=_softcap
    ),
    # Gemma 3 has a soft cap in its configuration, which its attention does not use.
    _layer("gemma3", "Gemma3"): Family(norms=_HEAD_AND_SANDWICH_NORMS, norm_adds_one=True, window=_layer_window),
    _layer("granite", "Granite"): Family(residual_scale=_residual_multiplier),
    _layer("granitemoehybrid", "GraniteMoeHybrid"): _GRANITE_HYBRID,
    _layer("hyperclovax", "HyperCLOVAX"): Family(
        norms=NormNames(attention_post="post_norm1", mlp_post="post_norm2"), residual_scale=_residual_multiplier
    ),
    _layer("llama", "Llama"): _LLAMA,
    _layer("ministral", "Ministral"): Family(window=_layer_window),
    _layer("mistral", "Mistral"): Family(window=_model_window),
    _layer("phi3", "Phi3"): _PHI3,
    _layer("phi4_multimodal", "Phi4Multimodal"): _PHI3,
    _layer("qwen2", "Qwen2"): Family(window=_layer_window),
    _layer("qwen3", "Qwen3"): Family(norms=_HEAD_NORMS, window=_layer_window),
    _layer("seed_oss", "SeedOss"): _LLAMA,
    _layer("smollm3", "SmolLM3"): Family(
        window=_layer_window, uses_rotary=lambda layer: bool(layer.self_attn.use_rope)
    ),
    _layer("vaultgemma", "VaultGemma"): Family(
        norms=NormNames(mlp="pre_feedforward_layernorm"), norm_adds_one=True, window=_layer_window, softcap=_softcap
    ),
}
"""From the full name of a layer's class to how it is read. Names, because importing every family takes seconds."""
