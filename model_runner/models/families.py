"""Known model families: how their decoder layers, and the parts around these, are read.

A layer can be in the table if it computes only this: RMSNorm, attention with rotary positions and grouped heads or a
recurrent mixer, RMSNorm, gated MLP or experts. `LayerFamily`, `Recurrent` and `Mixture` name possible variations. The
two dimensions of a rotated pair must be half the rotated width apart. Not supported are other norms, interleaved rotary
positions, and queries scaled by position.

A model can be in the table if the rest is only this: an embedding, rotary cos and sin, the layers in order, an RMS norm
and a linear head. `ModelFamily` names possible factors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import Literal

from model_runner.models.layer_family import (
    ClampedGate,
    Config,
    DeltaNet,
    Factors,
    LayerFamily,
    Mamba2,
    Mixture,
    NormNames,
    ShortConvolution,
    norm_eps,
)
from model_runner.models.parameters import StoredNames


def _is_sliding(config: Config, layer: int) -> bool:
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    return types is not None and types[layer] == "sliding_attention"


def _layer_window(config: Config, layer: int) -> int | None:
    window: int | None = config.sliding_window if _is_sliding(config, layer) else None
    return window


def _model_window(config: Config, layer: int) -> int | None:
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _query_scalar_scale(config: Config) -> float:
    return float(config.query_pre_attn_scalar**-0.5)


_softcap = attrgetter("attn_logit_softcapping")
_residual_multiplier = attrgetter("residual_multiplier")
_attention_multiplier = attrgetter("attention_multiplier")
_hidden_activation = attrgetter("hidden_activation")

_HEAD_NORMS = NormNames(query="self_attn.q_norm", key="self_attn.k_norm")
_SANDWICH_NORMS = NormNames(
    attention_post="post_attention_layernorm", mlp="pre_feedforward_layernorm", mlp_post="post_feedforward_layernorm"
)
_HEAD_AND_SANDWICH_NORMS = replace(_SANDWICH_NORMS, query="self_attn.q_norm", key="self_attn.k_norm")
_HEAD_AND_POST_NORMS = replace(_HEAD_AND_SANDWICH_NORMS, attention=None, mlp=None)

_LLAMA_LAYER = LayerFamily()
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
_MIXTRAL_LAYER = LayerFamily(
    window=_model_window,
    mixture=Mixture(),
    names=StoredNames(((".mlp.", ".block_sparse_moe."),), ("w1", "w3", "w2")),
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
    sum_eps=1e-20,  # all scores may be 0
    normalised=_normalises,
    scale=attrgetter("routed_scaling_factor"),
    choice_bias="mlp.gate.e_score_correction_bias",
    is_plain=lambda config: config.n_group == 1,  # with several groups, some are left out of the choice
    gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    down="mlp.shared_experts.down_proj",
    activation="mlp.shared_experts.act_fn",
)
_GPT_OSS_LAYER = LayerFamily(
    window=_layer_window,
    mixture=Mixture(router="mlp.router", gate=lambda config: ClampedGate(config.swiglu_alpha, config.swiglu_limit)),
    sinks="self_attn.sinks",
    halves_angles=True,
)
_GRANITE_LAYER = LayerFamily(scale=_attention_multiplier, residual_scale=_residual_multiplier)
_GRANITE_MOE_LAYER = replace(
    _GRANITE_LAYER,
    mixture=_GRANITE_MIXTURE,
    names=StoredNames(
        (
            ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
            ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
            ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
        )
    ),
)
_GRANITE_HYBRID_LAYER = replace(
    _GRANITE_MOE_LAYER,
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    activation="shared_mlp.activation",
    uses_rotary=lambda config, layer: config.position_embedding_type == "rope",
    recurrent=Mamba2(),
)
_NEMOTRON_H_LAYER = LayerFamily(
    norms=NormNames("norm", mlp="norm"),
    norm_eps=attrgetter("layer_norm_epsilon"),
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    attention_output="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    activation="mixer.act_fn",
    activation_name=attrgetter("mlp_hidden_act"),
    uses_rotary=lambda config, layer: False,
    parts=lambda config, layer: _NEMOTRON_H_PARTS.get(config.layer_types[layer]),
    has_gate=False,
    recurrent=Mamba2(
        "mixer",
        heads="mamba_num_heads",
        head_dim="mamba_head_dim",
        groups="n_groups",
        state="ssm_state_size",
        kernel="conv_kernel",
        activation="mamba_hidden_act",
        step_limits=lambda config: (config.time_step_min, inf),
    ),
    mixture=replace(
        _DEEPSEEK3_MIXTURE,
        experts="mixer.experts",
        router="mixer.gate",
        choice_bias="mixer.gate.e_score_correction_bias",
        gate_up=("mixer.shared_experts.up_proj",),
        down="mixer.shared_experts.down_proj",
        activation="mixer.shared_experts.act_fn",
        latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    ),
)
_NEMOTRON_H_PARTS: Mapping[str, Literal["mixer", "mlp"]] = {
    **dict.fromkeys(("linear_attention", "mamba", "full_attention", "attention"), "mixer"),
    **dict.fromkeys(("mlp", "moe"), "mlp"),
}


def _falcon_h1_factors(config: Config) -> Factors:
    gate, down = config.mlp_multipliers
    return Factors(
        attention_input=config.attention_in_multiplier,
        key=config.key_multiplier,
        attention_output=config.attention_out_multiplier,
        mamba_input=config.ssm_in_multiplier,
        mamba_parts=config.ssm_multipliers,
        mamba_output=config.ssm_out_multiplier,
        gate=gate,
        down=down,
    )


_FALCON_H1_LAYER = LayerFamily(
    norms=NormNames(mlp="pre_ff_layernorm"),
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    activation="feed_forward.act_fn",
    recurrent=Mamba2(
        has_norm=attrgetter("mamba_rms_norm"),
        is_plain=lambda config: not (config.mamba_rms_norm and config.mamba_norm_before_gate),
    ),
    is_side_by_side=True,
    factors=_falcon_h1_factors,
    returns_tuple=True,
)
_LFM2_LAYER = LayerFamily(
    norms=NormNames("operator_norm", mlp="ffn_norm", query="self_attn.q_layernorm", key="self_attn.k_layernorm"),
    norm_eps=attrgetter("norm_eps"),
    attention_output="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    activation=None,
    activation_name=lambda config: "silu",
    recurrent=ShortConvolution(),
)
_LFM2_MOE_LAYER = replace(
    _LFM2_LAYER,
    mixture=Mixture(
        experts="feed_forward.experts",
        router="feed_forward.gate",
        scoring="sigmoid",
        normalised=_normalises,
        scale=attrgetter("routed_scaling_factor"),
        sum_eps=1e-6,
        choice_bias="feed_forward.expert_bias",
        has_choice_bias=attrgetter("use_expert_bias"),
    ),
    names=StoredNames(expert=("w1", "w3", "w2")),
)
_GEMMA2_LAYER = LayerFamily(
    norms=_SANDWICH_NORMS,
    norm_adds_one=True,
    activation_name=_hidden_activation,
    scale=_query_scalar_scale,
    window=_layer_window,
    softcap=_softcap,
)
_QWEN35_LAYER = LayerFamily(norms=_HEAD_NORMS, norm_adds_one=True, gates_attention=True, recurrent=DeltaNet())
_QWEN35_MOE_LAYER = replace(_QWEN35_LAYER, mixture=replace(_QWEN2_MIXTURE, normalised=lambda config: True))
_QWEN3_NEXT_LAYER = replace(
    _QWEN35_LAYER, mixture=_QWEN2_MIXTURE, recurrent=DeltaNet(inputs=("in_proj_qkvz", "in_proj_ba"))
)
# Its attention ignores the soft cap in the configuration.
_GEMMA3_LAYER = replace(
    _GEMMA2_LAYER,
    norms=_HEAD_AND_SANDWICH_NORMS,
    softcap=lambda config: None,
    attends=lambda config, layer: not getattr(config, "use_bidirectional_attention", False),
    sees_images=True,
)
_EXAONE4_LAYER = LayerFamily(
    norms=_HEAD_AND_POST_NORMS,
    window=_layer_window,
    # In models with sliding windows, full-attention layers have no positions.
    uses_rotary=lambda config, layer: config.sliding_window is None or _is_sliding(config, layer),
)
_OLMO_HYBRID_LAYER = LayerFamily(
    norms=replace(_HEAD_AND_POST_NORMS, heads_together=True),
    recurrent_norms=NormNames(),
    uses_rotary=lambda config, layer: config.rope_parameters.get("rope_theta") is not None,
    recurrent=DeltaNet(
        inputs=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
        output="o_proj",
        norm="o_norm",
        norm_eps=1e-5,
        convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
        gain=lambda config: 2.0 if config.linear_allow_neg_eigval else 1.0,
    ),
    names=StoredNames(
        (("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm"))
    ),
)


def _one(config: Config) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How a family's models are read; defaults are Llama's. Functions take the text configuration."""

    decoder: str = "model"
    """Path of the module with embedding, layers, norm and rotary positions."""
    embedding: str = "embed_tokens"
    """Path of the embedding, below the decoder."""
    stored_decoders: tuple[str, ...] = ("model.", "")
    """Prefixes of the decoder's weights in checkpoints; a checkpoint has one of them."""
    ignored: tuple[str, ...] = ()
    """Prefixes of weights that are not used for text."""
    embedding_scale: Callable[[Config], float] = _one
    """Factor on the rows of the embedding."""
    norm: str = "norm"
    """Path of the last norm, below the decoder."""
    norm_adds_one: bool = False
    """Whether the factor of the last norm is 1 + its weight."""
    norm_eps: Callable[[Config], float] = norm_eps
    has_rotary: bool = True
    """Whether configurations have rotary parameters."""
    rotary_by_kind: bool = False
    """Whether each kind of layer has its own rotary positions."""
    rotates_partially: bool = False
    """Whether `partial_rotary_factor` applies to rotary positions without scaling, too."""
    rotary_sections: tuple[int, int, int] | None = None
    """In models for images, how many pairs of a head turn with the time, the height and the width of an image, unless
    the configuration says. They take turns (`mrope_interleaved`)."""
    logits_scale: Callable[[Config], float] = _one
    """Factor on the logits."""
    logits_softcap: Callable[[Config], float | None] = lambda config: None
    """Logits x become softcap * tanh(x / softcap)."""
    is_plain: Callable[[Config, Config], bool] = lambda config, text: True
    """False for models of the same class that process tokens in another way; takes the whole configuration, too."""


_embedding_multiplier = attrgetter("embedding_multiplier")
_GEMMA_MODEL = ModelFamily(embedding_scale=lambda config: config.hidden_size**0.5, norm_adds_one=True)
_CAPPED_GEMMA_MODEL = replace(_GEMMA_MODEL, logits_softcap=attrgetter("final_logit_softcapping"))
_GRANITE_MODEL = ModelFamily(
    embedding_scale=_embedding_multiplier, logits_scale=lambda config: 1 / config.logits_scaling
)
_GEMMA3_MODEL = replace(_CAPPED_GEMMA_MODEL, rotary_by_kind=True)
# Its logits have no soft cap, whatever the configuration says.
_GEMMA3_WITH_IMAGES = replace(
    _GEMMA_MODEL,
    decoder="model.language_model",
    stored_decoders=("language_model.model.", "model.language_model."),
    ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    rotary_by_kind=True,
    is_plain=lambda config, text: config.image_token_id < text.vocab_size,
)
_QWEN35_MODEL = ModelFamily(norm_adds_one=True, rotates_partially=True, rotary_sections=(11, 11, 10))
_QWEN35_WITH_IMAGES = replace(
    _QWEN35_MODEL,
    decoder="model.language_model",
    stored_decoders=("model.language_model.",),
    ignored=("model.visual.",),
)
_PARTIAL_MODEL = ModelFamily(rotates_partially=True)
_LFM2_MODEL = ModelFamily(norm="embedding_norm", norm_eps=attrgetter("norm_eps"))
_PHI4_MODEL = ModelFamily(rotates_partially=True, ignored=("model.embed_tokens_extend.",))


@dataclass(frozen=True, slots=True)
class Family:
    """A transformers family, by its folder and the prefix of its class names."""

    folder: str
    prefix: str
    layer: LayerFamily = _LLAMA_LAYER
    model: ModelFamily = ModelFamily()
    model_type: str = ""
    """Its name in configurations, if it is not the folder's."""
    model_class: str = "ForCausalLM"
    """Ending of the model's class name."""
    layer_classes: Sequence[str] = ("DecoderLayer",)
    """Endings of the layers' class names."""

    @property
    def has_text_config(self) -> bool:
        """Whether the configuration of its language model is a part of the whole one."""
        return self.model.decoder != "model"

    def name(self, suffix: str) -> str:
        """The full name of a class."""
        return f"transformers.models.{self.folder}.modeling_{self.folder}.{self.prefix}{suffix}"


_KNOWN = (
    Family("cwm", "Cwm", LayerFamily(window=_layer_window)),
    Family("dots1", "Dots1", LayerFamily(norms=_HEAD_NORMS, window=_layer_window, mixture=_DEEPSEEK3_MIXTURE)),
    Family("emu3", "Emu3", model_type="emu3_text_model"),
    Family("exaone4", "Exaone4", _EXAONE4_LAYER),
    Family(
        "falcon_h1", "FalconH1", _FALCON_H1_LAYER,
        ModelFamily(
            embedding_scale=_embedding_multiplier, norm="final_layernorm",
            logits_scale=attrgetter("lm_head_multiplier"),
        ),
    ),
    Family("gemma", "Gemma", LayerFamily(norm_adds_one=True), _GEMMA_MODEL),
    Family("gemma2", "Gemma2", _GEMMA2_LAYER, _CAPPED_GEMMA_MODEL),
    Family("gemma3", "Gemma3", _GEMMA3_LAYER, _GEMMA3_MODEL, "gemma3_text"),
    Family("gemma3", "Gemma3", _GEMMA3_LAYER, _GEMMA3_WITH_IMAGES, model_class="ForConditionalGeneration"),
    Family("gpt_oss", "GptOss", _GPT_OSS_LAYER),
    Family("granite", "Granite", _GRANITE_LAYER, _GRANITE_MODEL),
    Family("granitemoe", "GraniteMoe", _GRANITE_MOE_LAYER, _GRANITE_MODEL),
    Family("granitemoehybrid", "GraniteMoeHybrid", _GRANITE_HYBRID_LAYER, _GRANITE_MODEL),
    Family("granitemoeshared", "GraniteMoeShared", _GRANITE_MOE_LAYER, _GRANITE_MODEL),
    Family(
        "hyperclovax", "HyperCLOVAX",
        replace(
            _GRANITE_LAYER,
            norms=NormNames(attention_post="post_norm1", mlp_post="post_norm2"),
            has_post_norms=attrgetter("use_post_norm"),
        ),
        ModelFamily(embedding_scale=_embedding_multiplier, logits_scale=attrgetter("logits_scaling")),
    ),
    Family("lfm2", "Lfm2", _LFM2_LAYER, _LFM2_MODEL),
    Family("lfm2_moe", "Lfm2Moe", _LFM2_MOE_LAYER, _LFM2_MODEL),
    Family("llama", "Llama"),
    Family(
        "mellum", "Mellum", LayerFamily(norms=_HEAD_NORMS, window=_layer_window, mixture=_QWEN3_MIXTURE),
        ModelFamily(rotary_by_kind=True, rotates_partially=True),
    ),
    Family("ministral", "Ministral", LayerFamily(window=_layer_window)),
    Family("mistral", "Mistral", LayerFamily(window=_model_window)),
    Family("mixtral", "Mixtral", _MIXTRAL_LAYER),
    Family(
        "nemotron_h", "NemotronH", _NEMOTRON_H_LAYER,
        ModelFamily(
            embedding="embeddings", stored_decoders=("model.", "backbone."), norm="norm_f",
            norm_eps=attrgetter("layer_norm_epsilon"), has_rotary=False,
        ),
        layer_classes=("Block",),
    ),
    Family(
        "olmo_hybrid", "OlmoHybrid", _OLMO_HYBRID_LAYER,
        layer_classes=("AttentionDecoderLayer", "LinearAttentionDecoderLayer"),
    ),
    Family("phi3", "Phi3", _PHI3_LAYER, _PARTIAL_MODEL),
    Family("phi4_multimodal", "Phi4Multimodal", _PHI3_LAYER, _PHI4_MODEL),
    Family("qwen2", "Qwen2", LayerFamily(window=_layer_window)),
    Family("qwen2_moe", "Qwen2Moe", LayerFamily(window=_layer_window, mixture=_QWEN2_MIXTURE)),
    Family("qwen3", "Qwen3", LayerFamily(norms=_HEAD_NORMS, window=_layer_window)),
    Family("qwen3_moe", "Qwen3Moe", LayerFamily(norms=_HEAD_NORMS, window=_model_window, mixture=_QWEN3_MIXTURE)),
    Family("qwen3_5", "Qwen3_5", _QWEN35_LAYER, _QWEN35_MODEL, "qwen3_5_text"),
    Family("qwen3_5", "Qwen3_5", _QWEN35_LAYER, _QWEN35_WITH_IMAGES, model_class="ForConditionalGeneration"),
    Family("qwen3_5_moe", "Qwen3_5Moe", _QWEN35_MOE_LAYER, _QWEN35_MODEL, "qwen3_5_moe_text"),
    Family("qwen3_5_moe", "Qwen3_5Moe", _QWEN35_MOE_LAYER, _QWEN35_WITH_IMAGES, model_class="ForConditionalGeneration"),
    Family("qwen3_next", "Qwen3Next", _QWEN3_NEXT_LAYER, _QWEN35_MODEL),
    Family("seed_oss", "SeedOss"),
    Family(
        "smollm3", "SmolLM3",
        LayerFamily(
            window=lambda config, layer: _layer_window(config, layer) if config.use_sliding_window else None,
            uses_rotary=lambda config, layer: bool(config.no_rope_layers[layer]),
        ),
    ),
    Family("solar_open", "SolarOpen", LayerFamily(mixture=_DEEPSEEK3_MIXTURE), _PARTIAL_MODEL),
    Family(
        "vaultgemma", "VaultGemma", replace(_GEMMA2_LAYER, norms=NormNames(mlp="pre_feedforward_layernorm")),
        _CAPPED_GEMMA_MODEL,
    ),
)  # fmt: skip

LAYER_FAMILIES = {family.name(ending): family.layer for family in _KNOWN for ending in family.layer_classes}
"""How to read a layer, by the full name of its class. Names, because importing every family takes seconds."""
MODEL_CLASSES = {family.name(family.model_class): family for family in _KNOWN}
"""Families by the full name of the model's class."""
MODEL_TYPES = {family.model_type or family.folder: family for family in _KNOWN}
"""Families by `model_type` in config.json."""
