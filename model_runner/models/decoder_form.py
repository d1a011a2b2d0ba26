"""The weights and settings of a common decoder layer as plain data, for one native operator."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from model_runner.attention.backend import AttentionOptions
from model_runner.models.families import ClampedGate, Config, LayerFamily, Mixture, head_dim
from model_runner.models.parameters import Linear, Parameters

Activation = Literal["silu", "gelu_tanh"]
Scoring = Literal["softmax", "sigmoid"]

_NAMES: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Activations by their names in configurations."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Factors of a layer's RMS norms: x becomes x / sqrt(mean(x²) + eps) * factor. None where the layer has no norm."""

    eps: float
    attention: Tensor | None  # [hidden], before the attention
    attention_post: Tensor | None  # [hidden], after the attention
    mlp: Tensor | None  # [hidden], before the MLP
    mlp_post: Tensor | None  # [hidden], after the MLP
    query: Tensor | None  # [head_dim], on each head before the rotation
    key: Tensor | None  # [head_dim], on each head before the rotation


@dataclass(frozen=True, slots=True)
class ExpertsForm:
    """A mixture of experts, each a gated MLP: the weighted sum of the `top_k` experts with the highest scores.

    An activation gates by activation(gate) * up.
    """

    gate_up: Sequence[Linear]  # of each expert [2 * intermediate, hidden], gate first
    down: Sequence[Linear]  # of each expert [hidden, intermediate]
    router: Tensor  # [experts, hidden]
    top_k: int
    activation: Activation | ClampedGate
    scoring: Scoring
    """How scores are computed from the router's logits: softmax over all experts, or each expert's sigmoid. The scores
    of the chosen experts are their weights in the sum."""
    normalised: bool
    """Whether the chosen experts' weights are divided by their sum."""
    scale: float
    """Factor on all weights, after normalisation."""
    choice_bias: Tensor | None  # [experts], added to the scores only to choose experts
    mlp_gate: Tensor | None  # [hidden]: the sigmoid of its product with a row scales the MLP's output
    router_bias: Tensor | None = None  # [experts], added to the router's logits


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """A decoder layer: norm, attention with rotary positions, norm, gated MLP; attention and MLP each have a residual.

        x = x + residual_scale * post_norm(attention(norm(x)))
        x = x + residual_scale * post_norm(down(activation(gate(norm(x))) * up(norm(x))))

    With experts, their sum is added to the MLP's output. A layer with experts may have no MLP.
    """

    hidden: int
    """Width of the residual stream."""
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query, key or value."""
    qkv: Linear  # outputs: query heads, key heads, value heads
    attention_output: Linear
    gate_up: Linear | None  # outputs: gate, up
    down: Linear | None
    norms: Norms
    activation: Activation
    attention: AttentionOptions
    uses_rotary: bool
    """Whether queries and keys are rotated by position, in the leading dimensions that cos and sin cover.

    If False, the model may pass None for cos and sin.
    """
    residual_scale: float
    experts: ExpertsForm | None = None
    halves_angles: bool = False
    """Whether cos and sin of the model's modules have one number for each pair of dimensions, not two."""

    @property
    def intermediate(self) -> int:
        """Width between the MLP's linears; 0 without an MLP."""
        return 0 if self.down is None else self.down.inputs


def read_form(family: LayerFamily, config: Config, layer: int, parameters: Parameters) -> DecoderForm | None:
    """The form of a layer whose family is known.

    Args:
        family: how the layer is read.
        config: the text configuration.
        layer: its index.
        parameters: the layer's weights; they note which ones are missing or have another shape.

    Returns:
        None if the configuration asks for something that is not in the common family.
    """
    activation = _NAMES.get(family.activation_name(config))
    if activation is None or not family.attends(config, layer):
        return None
    experts, mixture = None, family.mixture
    if mixture is not None and parameters.has(f"{mixture.router}.weight"):
        experts = _read_experts(mixture, config, activation, parameters)
        if experts is None:
            return None
        family = _beside_experts(family, mixture, parameters)
    hidden, width = config.hidden_size, head_dim(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    gate_up = parameters.linear(family.gate_up, None, hidden) if family.gate_up else None
    sinks = None if family.sinks is None else parameters.require(family.sinks, heads).float().contiguous()
    return DecoderForm(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        qkv=parameters.linear(family.qkv, (heads + 2 * kv_heads) * width, hidden),
        attention_output=parameters.linear([family.attention_output], hidden, heads * width),
        gate_up=gate_up,
        down=None if gate_up is None else parameters.linear([family.down], hidden, gate_up.outputs // 2),
        norms=_norms(family, config, width, parameters),
        activation=activation,
        attention=AttentionOptions(
            family.scale(config),
            family.window(config, layer),
            family.softcap(config),
            sinks=sinks,
            sees_spans=family.sees_images,
        ),
        uses_rotary=family.uses_rotary(config, layer),
        residual_scale=family.residual_scale(config),
        experts=experts,
        halves_angles=family.halves_angles,
    )


def _beside_experts(family: LayerFamily, mixture: Mixture, parameters: Parameters) -> LayerFamily:
    """The family of a layer with experts: its MLP is the one next to the experts, if there is one."""
    has_mlp = mixture.gate_up != () and parameters.has(f"{mixture.down}.weight")
    return replace(family, gate_up=mixture.gate_up if has_mlp else (), down=mixture.down)


def _read_experts(
    mixture: Mixture, config: Config, activation: Activation, parameters: Parameters
) -> ExpertsForm | None:
    """None if the configuration chooses experts in another way than the family."""
    top_k, hidden = config.num_experts_per_tok, config.hidden_size
    router = parameters.tensor(f"{mixture.router}.weight")
    if router is None or not mixture.is_plain(config) or not 1 <= top_k <= len(router):
        return None
    gate_up, down = parameters.experts(mixture.experts, len(router), hidden)
    gate = None if mixture.mlp_gate is None else parameters.tensor(f"{mixture.mlp_gate}.weight", 1, hidden)
    return ExpertsForm(
        gate_up=gate_up,
        down=down,
        router=router,
        top_k=top_k,
        activation=mixture.gate(config) or activation,
        scoring=mixture.scoring,
        normalised=mixture.normalised(config),
        scale=mixture.scale(config),
        choice_bias=None if mixture.choice_bias is None else parameters.require(mixture.choice_bias, len(router)),
        mlp_gate=None if gate is None else gate[0],
        router_bias=parameters.tensor(f"{mixture.router}.bias", len(router)),
    )


def _norms(family: LayerFamily, config: Config, width: int, parameters: Parameters) -> Norms:
    names = family.norms
    if not family.has_post_norms(config):
        names = replace(names, attention_post=None, mlp_post=None)

    def factor(name: str | None, size: int) -> Tensor | None:
        if name is None:
            return None
        weight = parameters.require(f"{name}.weight", size)
        # In float32, as the norm computes it: bfloat16 would round 1 + weight to 8 bits.
        return 1 + weight.float() if family.norm_adds_one else weight

    hidden = config.hidden_size
    return Norms(
        eps=config.rms_norm_eps,
        attention=factor(names.attention, hidden),
        attention_post=factor(names.attention_post, hidden),
        mlp=factor(names.mlp, hidden),
        mlp_post=factor(names.mlp_post, hidden),
        query=factor(names.query, width),
        key=factor(names.key, width),
    )
