"""Known model families: how their decoder layers, and the parts around these, are read.

A layer can be in the table if it computes only this: RMSNorm, attention with rotary positions and grouped heads,
RMSNorm, gated MLP or experts. `LayerFamily` and `Mixture` name possible variations. The two dimensions of a rotated
pair must be half the rotated width apart. Not supported are other norms, interleaved rotary positions, norms over all
heads at once, gated attention, attention sinks, and queries scaled by position.

A model can be in the table if the rest is only this: an embedding, rotary cos and sin, the layers in order, an RMS norm
and a linear head. `ModelFamily` names possible factors.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormNames:
    """Paths of a layer's RMS norms; None where it has none. The defaults are Llama's."""

    attention: str | None = "input_layernorm"
    """Before the attention."""
    attention_post: str | None = None
    """After the attention, before the residual is added."""
    mlp: str | None = "post_attention_layernorm"
    """Before the MLP."""
    mlp_post: str | None = None
    """After the MLP, before the residual is added."""
    query: str | None = None
    """On each head of the queries, before the rotation."""
    key: str | None = None
    """On each head of the keys, before the rotation."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """How the experts of a layer are read. Names are paths below the layer; functions take the router."""

    experts: str = "mlp.experts"
    router: str = "mlp.gate"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How scores are computed (`ExpertsForm.scoring`). Softmax over the chosen experts alone equals softmax over all,
    normalised."""
    normalised: Callable[[Any], bool] = lambda router: True
    scale: Callable[[Any], float] = lambda router: 1.0
    choice_bias: Callable[[Any], Tensor | None] = lambda router: None
    is_plain: Callable[[Any], bool] = lambda router: True
    """False for routers of the same class that choose experts in another way."""
    gate_up: tuple[str, ...] = ()
    """Gate and up of the MLP next to the experts; layers may have none."""
    down: str = ""
    activation: str = ""
    mlp_gate: str | None = None
    """Path of the linear layer that gates that MLP."""


@dataclass(frozen=True, slots=True)
class LayerFamily:
    """How a family's layers are read. Names are paths below the layer; functions take it; defaults are Llama's."""

    norms: NormNames = NormNames()
    norm_adds_one: bool = False
    """Whether the factor of a norm is 1 + its weight."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Queries, keys and values, or one module with all three."""
    attention_output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up, or one module with both."""
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    window: Callable[[Any], int | None] = lambda layer: None
    softcap: Callable[[Any], float | None] = lambda layer: None
    uses_rotary: Callable[[Any], bool] = lambda layer: True
    residual_scale: Callable[[Any], float] = lambda layer: 1.0
    attends: Callable[[Any], bool] = lambda layer: True
    """False for layers of the same class without standard attention."""
    mixture: Mixture | None = None
    """How experts are read, for layers that have them."""


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

_PHI3_LAYER = LayerFamily(
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
    is_plain=lambda router: router.num_group == 1,  # with several groups, some are left out of the choice
    gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    down="mlp.shared_experts.down_proj",
    activation="mlp.shared_experts.act_fn",
)
_GRANITE_MOE_LAYER = LayerFamily(residual_scale=_residual_multiplier, mixture=_GRANITE_MIXTURE)
_GRANITE_HYBRID_LAYER = LayerFamily(
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    activation="shared_mlp.activation",
    uses_rotary=lambda layer: layer.self_attn.config.position_embedding_type == "rope",
    residual_scale=_residual_multiplier,
    attends=lambda layer: layer.self_attn is not None,
    mixture=_GRANITE_MIXTURE,
)
_EXAONE4_LAYER = LayerFamily(
    norms=_HEAD_AND_POST_NORMS,
    window=lambda layer: layer.self_attn.sliding_window if layer.self_attn.is_sliding else None,
    # In models with sliding windows, full-attention layers have no positions.
    uses_rotary=lambda layer: layer.self_attn.sliding_window is None or layer.self_attn.is_sliding,
)


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


def _one(model: Any) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How a family's models are read. Functions take the model; defaults are Llama's."""

    decoder: str = "model"
    """Path of the module with embedding, layers, norm and rotary positions."""
    embedding_scale: Callable[[Any], float] = _one
    """Factor on the rows of the embedding."""
    norm_adds_one: bool = False
    """Whether the factor of the last norm is 1 + its weight."""
    rotary_by_kind: bool = False
    """Whether each kind of layer has its own rotary positions."""
    logits_scale: Callable[[Any], float] = _one
    """Factor on the logits."""
    logits_softcap: Callable[[Any], float | None] = lambda model: None
    """Logits x become softcap * tanh(x / softcap)."""
    is_plain: Callable[[Any], bool] = lambda model: True
    """False for models of the same class that process tokens in another way."""


def _scale_of_embedding(model: Any) -> float:
    return float(model.get_input_embeddings().embed_scale)


def _multiplier_of_model(model: Any) -> float:
    return float(model.model.embedding_multiplier)


def _final_softcap(model: Any) -> float | None:
    cap: float | None = _text_config(model).final_logit_softcapping
    return cap


_GEMMA_MODEL = ModelFamily(embedding_scale=_scale_of_embedding, norm_adds_one=True)
_CAPPED_GEMMA_MODEL = replace(_GEMMA_MODEL, logits_softcap=_final_softcap)
_GRANITE_MODEL = ModelFamily(
    embedding_scale=_multiplier_of_model, logits_scale=lambda model: 1 / _text_config(model).logits_scaling
)


@dataclass(frozen=True, slots=True)
class _Known:
    """A transformers family, by its folder and the prefix of its class names."""

    folder: str
    prefix: str
    layer: LayerFamily = LayerFamily()
    model: ModelFamily = ModelFamily()

    def name(self, suffix: str) -> str:
        """The full name of a class."""
        return f"transformers.models.{self.folder}.modeling_{self.folder}.{self.prefix}{suffix}"


_KNOWN = (
    _Known("cwm", "Cwm", LayerFamily(window=_layer_window)),
    _Known("dots1", "Dots1", LayerFamily(norms=_HEAD_NORMS, window=_layer_window, mixture=_DEEPSEEK3_MIXTURE)),
    _Known("emu3", "Emu3"),
    _Known("exaone4", "Exaone4", _EXAONE4_LAYER),
    _Known("gemma", "Gemma", LayerFamily(norm_adds_one=True), _GEMMA_MODEL),
    _Known(
        "gemma2", "Gemma2",
        LayerFamily(norms=_SANDWICH_NORMS, norm_adds_one=True, window=_layer_window, softcap=_softcap),
        _CAPPED_GEMMA_MODEL,
    ),
    # Its attention ignores the soft cap in the configuration.
    _Known(
        "gemma3", "Gemma3", LayerFamily(norms=_HEAD_AND_SANDWICH_NORMS, norm_adds_one=True, window=_layer_window),
        replace(_CAPPED_GEMMA_MODEL, rotary_by_kind=True),
    ),
    _Known("granite", "Granite", LayerFamily(residual_scale=_residual_multiplier), _GRANITE_MODEL),
    _Known("granitemoe", "GraniteMoe", _GRANITE_MOE_LAYER, _GRANITE_MODEL),
    _Known("granitemoehybrid", "GraniteMoeHybrid", _GRANITE_HYBRID_LAYER, _GRANITE_MODEL),
    _Known("granitemoeshared", "GraniteMoeShared", _GRANITE_MOE_LAYER, _GRANITE_MODEL),
    _Known(
        "hyperclovax", "HyperCLOVAX",
        LayerFamily(
            norms=NormNames(attention_post="post_norm1", mlp_post="post_norm2"), residual_scale=_residual_multiplier
        ),
        ModelFamily(
            embedding_scale=_multiplier_of_model, logits_scale=lambda model: _text_config(model).logits_scaling
        ),
    ),
    _Known("llama", "Llama"),
    _Known(
        "mellum", "Mellum", LayerFamily(norms=_HEAD_NORMS, window=_layer_window, mixture=_QWEN3_MIXTURE),
        ModelFamily(rotary_by_kind=True),
    ),
    _Known("ministral", "Ministral", LayerFamily(window=_layer_window)),
    _Known("mistral", "Mistral", LayerFamily(window=_model_window)),
    _Known("mixtral", "Mixtral", LayerFamily(window=_model_window, mixture=Mixture())),
    _Known("phi3", "Phi3", _PHI3_LAYER),
    _Known("phi4_multimodal", "Phi4Multimodal", _PHI3_LAYER),
    _Known("qwen2", "Qwen2", LayerFamily(window=_layer_window)),
    _Known(
        "qwen2_moe", "Qwen2Moe",
        # Full-attention layers have no such attribute.
        LayerFamily(window=lambda layer: getattr(layer.self_attn, "sliding_window", None), mixture=_QWEN2_MIXTURE),
    ),
    _Known("qwen3", "Qwen3", LayerFamily(norms=_HEAD_NORMS, window=_layer_window)),
    _Known("qwen3_moe", "Qwen3Moe", LayerFamily(norms=_HEAD_NORMS, window=_layer_window, mixture=_QWEN3_MIXTURE)),
    _Known("seed_oss", "SeedOss"),
    _Known(
        "smollm3", "SmolLM3",
        LayerFamily(window=_layer_window, uses_rotary=lambda layer: bool(layer.self_attn.use_rope)),
    ),
    _Known("solar_open", "SolarOpen", LayerFamily(mixture=_DEEPSEEK3_MIXTURE)),
    _Known(
        "vaultgemma", "VaultGemma",
        LayerFamily(
            norms=NormNames(mlp="pre_feedforward_layernorm"), norm_adds_one=True, window=_layer_window, softcap=_softcap
        ),
        _CAPPED_GEMMA_MODEL,
    ),
)  # fmt: skip
_GEMMA3 = next(known for known in _KNOWN if known.folder == "gemma3")

LAYER_FAMILIES = {known.name("DecoderLayer"): known.layer for known in _KNOWN}
"""How to read a layer, by the full name of its class. Names, because importing every family takes seconds."""
MODEL_FAMILIES = {
    **{known.name("ForCausalLM"): known.model for known in _KNOWN},
    # Its logits have no soft cap, whatever the configuration says.
    _GEMMA3.name("ForConditionalGeneration"): replace(
        _GEMMA_MODEL,
        decoder="model.language_model",
        rotary_by_kind=True,
        is_plain=lambda model: model.config.image_token_id < _text_config(model).vocab_size,
    ),
}
"""How to read a model, by the full name of its class."""
