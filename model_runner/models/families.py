"""Known model families: how their decoder layers, and the parts around these, are read.

A layer can be in the table if it computes only this: RMSNorm, attention with rotary positions and grouped heads or a
recurrent mixer, RMSNorm, gated MLP or experts. `LayerFamily`, `Recurrent` and `Mixture` name possible variations. The
two dimensions of a rotated pair must be half the rotated width apart. Not supported are other norms, interleaved rotary
positions, norms over all heads at once, and queries scaled by position.

A model can be in the table if the rest is only this: an embedding, rotary cos and sin, the layers in order, an RMS norm
and a linear head. `ModelFamily` names possible factors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import Any, Literal

from model_runner.models.parameters import SAME_NAMES, StoredNames


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


Config = Any
"""A text configuration, as transformers has it."""


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The gate of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with gate at most and up within ± limit."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Mixture:
    """How the experts of a layer are read. Names are paths below the layer; functions take the configuration."""

    experts: str = "mlp.experts"
    router: str = "mlp.gate"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How scores are computed (`ExpertsForm.scoring`). Softmax over the chosen experts alone equals softmax over all,
    normalised."""
    normalised: Callable[[Config], bool] = lambda config: True
    scale: Callable[[Config], float] = lambda config: 1.0
    choice_bias: str | None = None
    """Path of the bias that is added to the scores to choose experts."""
    is_plain: Callable[[Config], bool] = lambda config: True
    """False for configurations that choose experts in another way."""
    gate_up: tuple[str, ...] = ()
    """Gate and up of the MLP next to the experts; layers may have none."""
    down: str = ""
    activation: str = ""
    mlp_gate: str | None = None
    """Path of the linear layer that gates that MLP."""
    names: StoredNames = SAME_NAMES
    """How checkpoints name these weights."""
    gate: Callable[[Config], ClampedGate | None] = lambda config: None
    """The experts' gate if it is not activation(gate) * up. Experts with such a gate are stored as gpt-oss's."""


_NET_INPUTS = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """How gated delta nets are read, which are in the place of the attention of some layers."""

    path: str = "linear_attn"
    """Below the layer."""
    kinds: frozenset[str] = frozenset({"linear_attention"})
    """The kinds of layers that have one, in the configuration's `layer_types`."""
    by_key_head: bool = False
    """Whether qkv and z, and b and a, are one linear each, with all outputs of a key head together."""

    @property
    def inputs(self) -> Sequence[str]:
        """Its first linears, below the path."""
        return ("in_proj_qkvz", "in_proj_ba") if self.by_key_head else _NET_INPUTS

    @property
    def linears(self) -> Sequence[str]:
        """All of its linears, below the path."""
        return *self.inputs, "out_proj"


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Likewise for Mamba 2. Sizes are names of entries of the configuration."""

    path: str = "mamba"
    kinds: frozenset[str] = frozenset({"linear_attention", "mamba"})
    linears: Sequence[str] = ("in_proj", "out_proj")
    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    kernel: str = "mamba_d_conv"
    activation: str = "hidden_act"
    step_limits: Callable[[Config], Sequence[float]] = attrgetter("time_step_limit")


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """Likewise for short convolutions."""

    path: str = "conv"
    kinds: frozenset[str] = frozenset({"conv"})
    linears: Sequence[str] = ("in_proj", "out_proj")


Recurrent = DeltaNet | Mamba2 | ShortConvolution


_norm_eps = attrgetter("rms_norm_eps")


def _head_dim_scale(config: Config) -> float:
    return float(head_dim(config) ** -0.5)


@dataclass(frozen=True, slots=True)
class LayerFamily:
    """How a family's layers are read; defaults are Llama's.

    Names are paths below the layer. Functions take the text configuration, or that and the layer's index.
    """

    norms: NormNames = NormNames()
    has_post_norms: Callable[[Config], bool] = lambda config: True
    """Whether the layers have the norms that are named for after attention and MLP."""
    norm_adds_one: bool = False
    """Whether the factor of a norm is 1 + its weight."""
    norm_eps: Callable[[Config], float] = _norm_eps
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Queries, keys and values, or one module with all three."""
    gates_attention: bool = False
    """Whether the first module of `qkv` has a query and a gate for each head in turn."""
    attention_output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up, or one module with both."""
    down: str = "mlp.down_proj"
    activation: str | None = "mlp.act_fn"
    """Path of its module; None where it is a function."""
    activation_name: Callable[[Config], str] = attrgetter("hidden_act")
    scale: Callable[[Config], float] = _head_dim_scale
    """Factor on the products of queries and keys."""
    window: Callable[[Config, int], int | None] = lambda config, layer: None
    softcap: Callable[[Config], float | None] = lambda config: None
    uses_rotary: Callable[[Config, int], bool] = lambda config, layer: True
    residual_scale: Callable[[Config], float] = lambda config: 1.0
    attends: Callable[[Config, int], bool] = lambda config, layer: True
    """False for layers of the same class without standard causal attention."""
    parts: Callable[[Config, int], Literal["both", "mixer", "mlp"] | None] = lambda config, layer: "both"
    """Whether a layer has a mixer and an MLP, or one of them; None for layers of another kind."""
    has_gate: bool = True
    """Whether the MLP has a gate."""
    recurrent: Recurrent | None = None
    """How recurrent mixers are read, for layers that have them."""
    mixture: Mixture | None = None
    """How experts are read, for layers that have them."""
    sinks: str | None = None
    """Path of the attention sinks."""
    sees_images: bool = False
    """Whether the rows of an image see each other, also later ones."""
    halves_angles: bool = False
    """Whether the model's modules compute cos and sin of each pair once, not for both of its dimensions."""


def head_dim(config: Config) -> int:
    """Width of a query, key or value."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


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
    names=StoredNames(
        (
            ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
            ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
            ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
        )
    ),
)
_MIXTRAL_MIXTURE = Mixture(names=StoredNames(((".mlp.", ".block_sparse_moe."),), ("w1", "w3", "w2")))
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
_GRANITE_MOE_LAYER = replace(_GRANITE_LAYER, mixture=_GRANITE_MIXTURE)
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
    # Its experts have no gate either, which only the modules support.
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
)
_NEMOTRON_H_PARTS: Mapping[str, Literal["mixer", "mlp"]] = {
    "linear_attention": "mixer",
    "full_attention": "mixer",
    "mlp": "mlp",
}
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
_QWEN3_NEXT_LAYER = replace(_QWEN35_LAYER, mixture=_QWEN2_MIXTURE, recurrent=DeltaNet(by_key_head=True))
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
    norm_eps: Callable[[Config], float] = _norm_eps
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
_PHI4_MODEL = ModelFamily(rotates_partially=True, ignored=("model.embed_tokens_extend.",))


@dataclass(frozen=True, slots=True)
class Family:
    """A transformers family, by its folder and the prefix of its class names."""

    folder: str
    prefix: str
    layer: LayerFamily = LayerFamily()
    model: ModelFamily = ModelFamily()
    model_type: str = ""
    """Its name in configurations, if it is not the folder's."""
    model_class: str = "ForCausalLM"
    """Ending of the model's class name."""
    layer_class: str = "DecoderLayer"
    """Ending of the layers' class name."""

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
    Family("lfm2", "Lfm2", _LFM2_LAYER, ModelFamily(norm="embedding_norm", norm_eps=attrgetter("norm_eps"))),
    Family("llama", "Llama"),
    Family(
        "mellum", "Mellum", LayerFamily(norms=_HEAD_NORMS, window=_layer_window, mixture=_QWEN3_MIXTURE),
        ModelFamily(rotary_by_kind=True, rotates_partially=True),
    ),
    Family("ministral", "Ministral", LayerFamily(window=_layer_window)),
    Family("mistral", "Mistral", LayerFamily(window=_model_window)),
    Family("mixtral", "Mixtral", LayerFamily(window=_model_window, mixture=_MIXTRAL_MIXTURE)),
    Family(
        "nemotron_h", "NemotronH", _NEMOTRON_H_LAYER,
        ModelFamily(
            embedding="embeddings", stored_decoders=("model.", "backbone."), norm="norm_f",
            norm_eps=attrgetter("layer_norm_epsilon"),
        ),
        layer_class="Block",
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

LAYER_FAMILIES = {family.name(family.layer_class): family.layer for family in _KNOWN}
"""How to read a layer, by the full name of its class. Names, because importing every family takes seconds."""
MODEL_CLASSES = {family.name(family.model_class): family for family in _KNOWN}
"""Families by the full name of the model's class."""
MODEL_TYPES = {family.model_type or family.folder: family for family in _KNOWN}
"""Families by `model_type` in config.json."""
