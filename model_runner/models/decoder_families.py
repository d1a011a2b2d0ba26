"""Which decoder layers of transformers belong to the common family, and how each of them is read.

A layer is in the table if all it computes is: RMSNorm, attention with rotary positions (each pair of rotated dimensions
half of them apart) and grouped heads, RMSNorm, gated MLP or experts, with the variations that `Family` and `Mixture`
name. Families with other norms, interleaved rotary positions, norms over all heads at once, gates on the attention,
attention sinks or queries scaled by position are not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor


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
class Mixture:
    """How the experts of a layer are read. Names are paths below the layer, functions take the router."""

    experts: str = "mlp.experts"
    router: str = "mlp.gate"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """See Experts. The softmax of the chosen experts' scores alone is that of all, normalised."""
    normalised: Callable[[Any], bool] = lambda router: True
    scale: Callable[[Any], float] = lambda router: 1.0
    choice_bias: Callable[[Any], Tensor | None] = lambda router: None
    is_plain: Callable[[Any], bool] = lambda router: True
    """False for routers of the same class that choose in another way."""
    gate_up: tuple[str, ...] = ()
    """Of the MLP beside the experts; layers may do without."""
    down: str = ""
    activation: str = ""
    mlp_gate: str | None = None
    """Has the factor on that MLP."""


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
    attends: Callable[[Any], bool] = lambda layer: True
    """False for layers of the same class that have something else in place of the attention."""
    mixture: Mixture | None = None
    """How the experts are read in layers that have some."""


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
_normalises = attrgetter("norm_topk_prob")
_GRANITE_MIXTURE = Mixture(
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.router",
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    activation="shared_mlp.activation",
)
_QWEN2_MIXTURE = Mixture(
    normalised=_normalises,
    gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    down="mlp.shared_expert.down_proj",
    activation="mlp.shared_expert.act_fn",
    mlp_gate="mlp.shared_expert_gate",
)
_QWEN3_MIXTURE = Mixture(normalised=_normalises)
_DEEPSEEK3_MIXTURE = Mixture(
    scoring="sigmoid",
    normalised=_normalises,
    scale=attrgetter("routed_scaling_factor"),
    choice_bias=attrgetter("e_score_correction_bias"),
    is_plain=lambda router: router.num_group == 1,  # of several groups of experts some are left out
    gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    down="mlp.shared_experts.down_proj",
    activation="mlp.shared_experts.act_fn",
)
_GRANITE_MOE = Family(residual_scale=_residual_multiplier, mixture=_GRANITE_MIXTURE)
_GRANITE_HYBRID = Family(
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    activation="shared_mlp.activation",
    uses_rotary=lambda layer: layer.self_attn.config.position_embedding_type == "rope",
    residual_scale=_residual_multiplier,
    attends=lambda layer: layer.self_attn is not None,
    mixture=_GRANITE_MIXTURE,
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
    _layer("dots1", "Dots1"): Family(norms=_HEAD_NORMS, window=_layer_window, mixture=_DEEPSEEK3_MIXTURE),
    # Gemma 3 has a soft cap in its configuration, which its attention does not use.
    _layer("gemma3", "Gemma3"): Family(norms=_HEAD_AND_SANDWICH_NORMS, norm_adds_one=True, window=_layer_window),
    _layer("granite", "Granite"): Family(residual_scale=_residual_multiplier),
    _layer("granitemoe", "GraniteMoe"): _GRANITE_MOE,
    _layer("granitemoehybrid", "GraniteMoeHybrid"): _GRANITE_HYBRID,
    _layer("granitemoeshared", "GraniteMoeShared"): _GRANITE_MOE,
    _layer("hyperclovax", "HyperCLOVAX"): Family(
        norms=NormNames(attention_post="post_norm1", mlp_post="post_norm2"), residual_scale=_residual_multiplier
    ),
    _layer("llama", "Llama"): _LLAMA,
    _layer("mellum", "Mellum"): Family(norms=_HEAD_NORMS, window=_layer_window, mixture=_QWEN3_MIXTURE),
    _layer("ministral", "Ministral"): Family(window=_layer_window),
    _layer("mistral", "Mistral"): Family(window=_model_window),
    _layer("mixtral", "Mixtral"): Family(window=_model_window, mixture=Mixture()),
    _layer("phi3", "Phi3"): _PHI3,
    _layer("phi4_multimodal", "Phi4Multimodal"): _PHI3,
    _layer("qwen2", "Qwen2"): Family(window=_layer_window),
    _layer("qwen2_moe", "Qwen2Moe"): Family(
        # Layers that see everything have no such attribute.
        window=lambda layer: getattr(layer.self_attn, "sliding_window", None),
        mixture=_QWEN2_MIXTURE,
    ),
    _layer("qwen3", "Qwen3"): Family(norms=_HEAD_NORMS, window=_layer_window),
    _layer("qwen3_moe", "Qwen3Moe"): Family(norms=_HEAD_NORMS, window=_layer_window, mixture=_QWEN3_MIXTURE),
    _layer("seed_oss", "SeedOss"): _LLAMA,
    _layer("smollm3", "SmolLM3"): Family(
        window=_layer_window, uses_rotary=lambda layer: bool(layer.self_attn.use_rope)
    ),
    _layer("solar_open", "SolarOpen"): Family(mixture=_DEEPSEEK3_MIXTURE),
    _layer("vaultgemma", "VaultGemma"): Family(
        norms=NormNames(mlp="pre_feedforward_layernorm"), norm_adds_one=True, window=_layer_window, softcap=_softcap
    ),
}
"""From the full name of a layer's class to how it is read. Names, because importing every family takes seconds."""
