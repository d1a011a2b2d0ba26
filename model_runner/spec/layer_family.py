"""Descriptions of decoder layers for the table of model families (families.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from model_runner.weights.parameters import SAME_NAMES, StoredNames


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
    heads_together: bool = False
    """Whether the norms of queries and keys are over all heads at once."""


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
    """How scores are computed (`ExpertsSpec.scoring`). Softmax over the chosen experts alone equals softmax over all,
    normalised."""
    normalised: Callable[[Config], bool] = lambda config: True
    scale: Callable[[Config], float] = lambda config: 1.0
    sum_eps: float = 0.0
    """A small number that is added to the sum that normalises weights."""
    choice_bias: str | None = None
    """Path of the bias that is added to the scores to choose experts."""
    has_choice_bias: Callable[[Config], bool] = lambda config: True
    is_supported: Callable[[Config], bool] = lambda config: True
    """False for configurations that choose experts in another way."""
    gate_up: tuple[str, ...] = ()
    """Gate and up of the MLP next to the experts; layers may have none."""
    down: str = ""
    mlp_gate: str | None = None
    """Path of the linear layer that gates that MLP."""
    latent: tuple[str, str] | None = None
    """Linears before and after the experts, which layers may have: experts then take and return latents."""
    gate: Callable[[Config], ClampedGate | None] = lambda config: None
    """The experts' gate if it is not activation(gate) * up. Experts with such a gate are stored as gpt-oss's."""


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """How gated delta nets are read, which are in the place of the attention of some layers."""

    path: str = "linear_attn"
    """Below the layer."""
    kinds: frozenset[str] = frozenset({"linear_attention"})
    """The kinds of layers that have one, in the configuration's `layer_types`."""
    inputs: Sequence[str] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    """Its first linears, below the path. Of two, the first has qkv and z, the second b and a, and all outputs of a key
    head are together. Of six, each of q, k and v has its own."""
    output: str = "out_proj"
    norm: str = "norm"
    norm_eps: float | None = None
    """If it is not the layers'."""
    convolutions: Sequence[str] = ()
    """Convolutions of q, k and v, which checkpoints may have instead of one."""
    gain: Callable[[Config], float] = lambda config: 1.0
    """Factor on beta."""


@dataclass(frozen=True, slots=True)
class Mamba2:
    """How Mamba 2 mixers are read. Sizes are names of entries of the configuration."""

    path: str = "mamba"
    kinds: frozenset[str] = frozenset({"linear_attention", "mamba"})
    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    kernel: str = "mamba_d_conv"
    activation: str = "hidden_act"
    step_limits: Callable[[Config], Sequence[float]] = attrgetter("time_step_limit")
    has_norm: Callable[[Config], bool] = lambda config: True
    is_supported: Callable[[Config], bool] = lambda config: True
    """False for configurations that norm its output before the gate."""


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """How short convolutions are read, which are in the place of the attention of some layers."""

    path: str = "conv"
    kinds: frozenset[str] = frozenset({"conv"})


Recurrent = DeltaNet | Mamba2 | ShortConvolution


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors that a layer has on what its linears take and return; they become a part of the weights."""

    attention_input: float
    key: float
    attention_output: float
    mamba_input: float
    mamba_parts: Sequence[float]
    """On the gate, x, B, C and the steps of Mamba 2."""
    mamba_output: float
    gate: float
    """On the gate of the MLP, before its activation."""
    down: float


norm_eps = attrgetter("rms_norm_eps")
"""The usual entry of a configuration."""


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
    norm_eps: Callable[[Config], float] = norm_eps
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Queries, keys and values, or one module with all three."""
    gates_attention: bool = False
    """Whether the first module of `qkv` has a query and a gate for each head in turn."""
    attention_output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up, or one module with both."""
    down: str = "mlp.down_proj"
    activation_name: Callable[[Config], str] = attrgetter("hidden_act")
    scale: Callable[[Config], float] = _head_dim_scale
    """Factor on the products of queries and keys."""
    window: Callable[[Config, int], int | None] = lambda config, layer: None
    softcap: Callable[[Config], float | None] = lambda config: None
    uses_rotary: Callable[[Config, int], bool] = lambda config, layer: True
    residual_scale: Callable[[Config], float] = lambda config: 1.0
    attends: Callable[[Config, int], bool] = lambda config, layer: True
    """False for layers without standard causal attention."""
    parts: Callable[[Config, int], Literal["both", "mixer", "mlp"] | None] = lambda config, layer: "both"
    """Whether a layer has a mixer and an MLP, or one of them; None for layers of another kind."""
    has_gate: bool = True
    """Whether the MLP has a gate."""
    recurrent: Recurrent | None = None
    """How recurrent mixers are read, for layers that have them."""
    is_side_by_side: bool = False
    """Whether every layer has attention and a recurrent mixer, on the same rows."""
    recurrent_norms: NormNames | None = None
    """The norms of layers with a recurrent mixer, if they are others."""
    factors: Callable[[Config], Factors] | None = None
    mixture: Mixture | None = None
    """How experts are read, for layers that have them."""
    sinks: str | None = None
    """Path of the attention sinks."""
    sees_images: bool = False
    """Whether the rows of an image see each other, also later ones."""
    names: StoredNames = SAME_NAMES
    """How checkpoints name weights."""


def head_dim(config: Config) -> int:
    """Width of a query, key or value."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
