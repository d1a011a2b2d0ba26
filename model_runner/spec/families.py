"""Known model families: how their decoder layers, and the parts around these, are read.

A layer can be in the table if it computes only this: RMSNorm, attention with rotary positions and grouped heads or a
recurrent mixer, RMSNorm, gated MLP or experts. `LayerFamily`, `Recurrent` and `Mixture` name possible variations. The
two dimensions of a rotated pair must be half the rotated width apart. Not supported are other norms, interleaved rotary
positions, and queries scaled by position.

A model can be in the table if the rest is only this: an embedding, rotary cos and sin, the layers in order, an RMS norm
and a linear head. `ModelFamily` names possible factors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter
from typing import Any, Literal

from model_runner.spec.layer_family import (
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
from model_runner.weights.parameters import StoredNames


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
_PHI3_LAYER = LayerFamily(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",), window=_model_window)
_normalises = attrgetter("norm_topk_prob")
_GRANITE_MIXTURE = Mixture(
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.router",
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
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
    mlp_gate="mlp.shared_expert_gate",
)
_QWEN3_MIXTURE = Mixture(normalised=_normalises)
_DEEPSEEK3_MIXTURE = Mixture(
    scoring="sigmoid",
    sum_eps=1e-20,  # all scores may be 0
    normalised=_normalises,
    scale=attrgetter("routed_scaling_factor"),
    choice_bias="mlp.gate.e_score_correction_bias",
    is_supported=lambda config: config.n_group == 1,  # with several groups, some are left out of the choice
    gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    down="mlp.shared_experts.down_proj",
)
_GPT_OSS_LAYER = LayerFamily(
    window=_layer_window,
    mixture=Mixture(router="mlp.router", gate=lambda config: ClampedGate(config.swiglu_alpha, config.swiglu_limit)),
    sinks="self_attn.sinks",
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
    recurrent=Mamba2(
        has_norm=attrgetter("mamba_rms_norm"),
        is_supported=lambda config: not (config.mamba_rms_norm and config.mamba_norm_before_gate),
    ),
    is_side_by_side=True,
    factors=_falcon_h1_factors,
)
_LFM2_LAYER = LayerFamily(
    norms=NormNames("operator_norm", mlp="ffn_norm", query="self_attn.q_layernorm", key="self_attn.k_layernorm"),
    norm_eps=attrgetter("norm_eps"),
    attention_output="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
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
_EXAONE_LAYER = LayerFamily(
    names=StoredNames(
        (
            ("model.embed_tokens.", "transformer.wte."),
            ("model.layers.", "transformer.h."),
            ("model.norm.", "transformer.ln_f."),
            (".self_attn.o_proj.", ".self_attn.out_proj."),
            (".self_attn.", ".attn.attention."),
            (".input_layernorm.", ".ln_1."),
            (".post_attention_layernorm.", ".ln_2."),
            (".mlp.gate_proj.", ".mlp.c_fc_0."),
            (".mlp.up_proj.", ".mlp.c_fc_1."),
            (".mlp.down_proj.", ".mlp.c_proj."),
        )
    )
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

    embedding: str = "embed_tokens"
    """Path of the embedding, below the decoder."""
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


_embedding_multiplier = attrgetter("embedding_multiplier")
_GEMMA_MODEL = ModelFamily(embedding_scale=lambda config: config.hidden_size**0.5, norm_adds_one=True)
_CAPPED_GEMMA_MODEL = replace(_GEMMA_MODEL, logits_softcap=attrgetter("final_logit_softcapping"))
_GRANITE_MODEL = ModelFamily(
    embedding_scale=_embedding_multiplier, logits_scale=lambda config: 1 / config.logits_scaling
)
_QWEN35_MODEL = ModelFamily(norm_adds_one=True, rotates_partially=True, rotary_sections=(11, 11, 10))
_PARTIAL_MODEL = ModelFamily(rotates_partially=True)
_LFM2_MODEL = ModelFamily(norm="embedding_norm", norm_eps=attrgetter("norm_eps"))


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Entries of a family's config.json that transformers adds, renames or refuses."""

    divides_hidden: bool = False
    """Whether an absent head size is the hidden size divided by the heads."""
    window_needs_flag: bool = False
    """Whether `sliding_window` counts only with `use_sliding_window`. Other families do not have this flag."""
    window_period: int | None = None
    """How often a layer without a window comes, in older files that do not list the layers."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of entries that published files lack."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Names of entries in files, which take precedence, with transformers' names of them."""
    layer_letters: Mapping[str, str] = field(default_factory=dict)
    """Kinds of layers by the letters of `hybrid_override_pattern`, which older files have instead of a list."""
    rope_names: Mapping[str, str] = field(default_factory=dict)
    """Older names of rotary scaling."""
    refused: tuple[str, ...] = ()
    """Entries with which transformers refuses the family."""


_DIVIDED = ConfigFile(divides_hidden=True)
_TIED = {"tie_word_embeddings": True}
_ANY_STEP = {"time_step_limit": (0.0, inf)}
_FALCON_FACTORS = {
    **dict.fromkeys(("embedding_multiplier", "key_multiplier", "lm_head_multiplier"), 1.0),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
    **{"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5},
}
_LFM2_FILE = replace(_DIVIDED, defaults=_TIED, other_names={"tie_embedding": "tie_word_embeddings"})
_NEMOTRON_H_FILE = ConfigFile(
    defaults={"mamba_hidden_act": "silu"},
    other_names={
        "layers_block_type": "layer_types",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_n_groups": "n_groups",
    },
    layer_letters={"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"},
)
_FLAGGED = ConfigFile(window_needs_flag=True)


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one `model_type` are read."""

    layer: LayerFamily = _LLAMA_LAYER
    model: ModelFamily = ModelFamily()
    file: ConfigFile = ConfigFile()


FAMILIES: Mapping[str, Family] = {
    "cwm": Family(LayerFamily(window=_layer_window)),
    "dots1": Family(LayerFamily(norms=_HEAD_NORMS, window=_layer_window, mixture=_DEEPSEEK3_MIXTURE)),
    "emu3_text_model": Family(),
    "exaone": Family(_EXAONE_LAYER),
    "exaone4": Family(_EXAONE4_LAYER),
    "falcon_h1": Family(
        _FALCON_H1_LAYER,
        ModelFamily(
            embedding_scale=_embedding_multiplier,
            norm="final_layernorm",
            logits_scale=attrgetter("lm_head_multiplier"),
        ),
        file=replace(_DIVIDED, defaults={**_ANY_STEP, "mamba_norm_before_gate": True, **_FALCON_FACTORS}),
    ),
    "gemma": Family(LayerFamily(norm_adds_one=True), _GEMMA_MODEL, file=ConfigFile(defaults=_TIED)),
    "gemma2": Family(_GEMMA2_LAYER, _CAPPED_GEMMA_MODEL, file=ConfigFile(window_period=2, defaults=_TIED)),
    "gemma3": Family(_GEMMA3_LAYER, replace(_GEMMA_MODEL, rotary_by_kind=True)),  # never a soft cap on logits
    "gemma3_text": Family(
        _GEMMA3_LAYER,
        replace(_CAPPED_GEMMA_MODEL, rotary_by_kind=True),
        file=ConfigFile(
            window_period=6, defaults={**_TIED, "final_logit_softcapping": None, "use_bidirectional_attention": False}
        ),
    ),
    "gpt_oss": Family(_GPT_OSS_LAYER, file=ConfigFile(defaults={"swiglu_alpha": 1.702})),
    "granite": Family(_GRANITE_LAYER, _GRANITE_MODEL, file=_DIVIDED),
    "granitemoe": Family(_GRANITE_MOE_LAYER, _GRANITE_MODEL, file=_DIVIDED),
    "granitemoehybrid": Family(_GRANITE_HYBRID_LAYER, _GRANITE_MODEL, file=replace(_DIVIDED, defaults=_ANY_STEP)),
    "granitemoeshared": Family(_GRANITE_MOE_LAYER, _GRANITE_MODEL, file=_DIVIDED),
    "hyperclovax": Family(
        replace(
            _GRANITE_LAYER,
            norms=NormNames(attention_post="post_norm1", mlp_post="post_norm2"),
            has_post_norms=attrgetter("use_post_norm"),
        ),
        ModelFamily(embedding_scale=_embedding_multiplier, logits_scale=attrgetter("logits_scaling")),
    ),
    "internlm3": Family(),
    "iquestcoder": Family(file=ConfigFile(refused=("clip_qkv", "use_sliding_window"))),
    "lfm2": Family(_LFM2_LAYER, _LFM2_MODEL, file=_LFM2_FILE),
    "lfm2_moe": Family(_LFM2_MOE_LAYER, _LFM2_MODEL, file=_LFM2_FILE),
    "llama": Family(file=_DIVIDED),
    "mellum": Family(
        LayerFamily(norms=_HEAD_NORMS, window=_layer_window, mixture=_QWEN3_MIXTURE),
        ModelFamily(rotary_by_kind=True, rotates_partially=True),
    ),
    "ministral": Family(LayerFamily(window=_layer_window)),
    "mistral": Family(LayerFamily(window=_model_window), file=_DIVIDED),
    "mixtral": Family(_MIXTRAL_LAYER, file=replace(_DIVIDED, defaults={"sliding_window": None})),
    "nemotron_h": Family(
        _NEMOTRON_H_LAYER,
        ModelFamily(embedding="embeddings", norm="norm_f", norm_eps=attrgetter("layer_norm_epsilon"), has_rotary=False),
        file=_NEMOTRON_H_FILE,
    ),
    "olmo_hybrid": Family(_OLMO_HYBRID_LAYER, file=_DIVIDED),
    "phi3": Family(
        _PHI3_LAYER, _PARTIAL_MODEL, file=replace(_DIVIDED, rope_names={"su": "longrope", "yarn": "longrope"})
    ),
    "phi4_multimodal": Family(
        _PHI3_LAYER, ModelFamily(rotates_partially=True, ignored=("model.embed_tokens_extend.",))
    ),
    "qwen2": Family(LayerFamily(window=_layer_window), file=replace(_DIVIDED, window_needs_flag=True)),
    "qwen2_moe": Family(
        LayerFamily(window=_layer_window, mixture=_QWEN2_MIXTURE), file=replace(_DIVIDED, window_needs_flag=True)
    ),
    "qwen3": Family(LayerFamily(norms=_HEAD_NORMS, window=_layer_window), file=_FLAGGED),
    "qwen3_moe": Family(LayerFamily(norms=_HEAD_NORMS, window=_model_window, mixture=_QWEN3_MIXTURE), file=_FLAGGED),
    "qwen3_5_text": Family(_QWEN35_LAYER, _QWEN35_MODEL),
    "qwen3_5_moe_text": Family(_QWEN35_MOE_LAYER, _QWEN35_MODEL),
    "qwen3_next": Family(_QWEN3_NEXT_LAYER, _QWEN35_MODEL),
    "seed_oss": Family(),
    "smollm3": Family(
        LayerFamily(
            window=lambda config, layer: _layer_window(config, layer) if config.use_sliding_window else None,
            uses_rotary=lambda config, layer: bool(config.no_rope_layers[layer]),
        ),
        file=replace(_DIVIDED, window_needs_flag=True),
    ),
    "solar_open": Family(LayerFamily(mixture=_DEEPSEEK3_MIXTURE), _PARTIAL_MODEL),
    "vaultgemma": Family(replace(_GEMMA2_LAYER, norms=NormNames(mlp="pre_feedforward_layernorm")), _CAPPED_GEMMA_MODEL),
}
"""By `model_type`."""
WRAPPERS: Mapping[str, Sequence[tuple[str, str]]] = {
    **dict.fromkeys(("deepseek_vl", "deepseek_vl_hybrid", "emu3", "exaone4_5", "fast_vlm", "gemma3", "got_ocr2"), ()),
    **dict.fromkeys(("hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "janus", "lfm2_vl"), ()),
    **dict.fromkeys(("lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr"), ()),
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7", "mistral3", "moss_transcribe_diarize", "nemotron_h_omni"), ()),
    **dict.fromkeys(("ovis2", "perception_lm", "pp_chart2table", "qwen3_5", "qwen3_5_moe", "smolvlm"), ()),
    **dict.fromkeys(("video_llama_3", "video_llava", "vipllava"), ()),
    "qianfan_ocr": (("layers.", "encoder.layers."),),  # as transformers writes it
}
"""Types of models for images or sounds that compute text exactly as the language model in their `text_config` does.

For each, parts of weights' names that checkpoints have in addition to the language model's (StoredNames)."""


def find_family(model_type: object, text_type: object) -> Family | None:
    """The family of a model, by its own `model_type` and the one of its text configuration, which may be the same."""
    names = WRAPPERS.get(str(model_type))
    family = FAMILIES.get(str(model_type), None if names is None else FAMILIES.get(str(text_type)))
    if family is None or not names:
        return family
    stored = family.layer.names
    return replace(family, layer=replace(family.layer, names=replace(stored, parts=(*stored.parts, *names))))
