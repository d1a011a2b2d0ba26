"""The weights and settings of a common decoder layer as plain data, for one native operator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from model_runner.attention.backend import AttentionOptions
from model_runner.models.activations import EXACT, gelu_tanh, silu
from model_runner.models.experts import has_usual_layout
from model_runner.models.families import LAYER_FAMILIES, Config, LayerFamily, Mixture, head_dim
from model_runner.models.parameters import Linear, Parameters, TensorCheckpoint

Activation = Literal["silu", "gelu_tanh"]
Scoring = Literal["softmax", "sigmoid"]

_FUNCTIONS: dict[Callable[[Tensor], Tensor] | None, Activation] = {silu: "silu", gelu_tanh: "gelu_tanh"}
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
    """A mixture of experts, each a gated MLP: the weighted sum of the `top_k` experts with the highest scores."""

    gate_up: Sequence[Linear]  # of each expert [2 * intermediate, hidden], gate first
    down: Sequence[Linear]  # of each expert [hidden, intermediate]
    router: Tensor  # [experts, hidden]
    top_k: int
    activation: Activation
    scoring: Scoring
    """How scores are computed from the router's logits: softmax over all experts, or each expert's sigmoid. The scores
    of the chosen experts are their weights in the sum."""
    normalised: bool
    """Whether the chosen experts' weights are divided by their sum."""
    scale: float
    """Factor on all weights, after normalisation."""
    choice_bias: Tensor | None  # [experts], added to the scores only to choose experts
    mlp_gate: Tensor | None  # [hidden]: the sigmoid of its product with a row scales the MLP's output


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

    @property
    def intermediate(self) -> int:
        """Width between the MLP's linears; 0 without an MLP."""
        return 0 if self.down is None else self.down.inputs


def recognise(layer: nn.Module) -> DecoderForm | None:
    """Read a decoder layer of a model in memory. The form shares the layer's tensors.

    Args:
        layer: as transformers loads it, in evaluation mode, before its weights and activations are replaced.

    Returns:
        The layer's form, or None if it is not exactly a layer of the common family. It may have another class, be in
        training mode, not be causal, or have other kinds of linears, experts or activations.
    """
    family = LAYER_FAMILIES.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
    attention: Any = getattr(layer, "self_attn", None)
    if family is None or layer.training or attention is None or not attention.is_causal:
        return None
    tensors = {name: parameter.detach() for name, parameter in layer.named_parameters()} | dict(layer.named_buffers())
    form = read_form(family, attention.config, attention.layer_idx, Parameters(TensorCheckpoint(tensors)))
    return form if form is not None and _has_plain_parts(layer, family, form) else None


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
        attention=AttentionOptions(family.scale(config), family.window(config, layer), family.softcap(config)),
        uses_rotary=family.uses_rotary(config, layer),
        residual_scale=family.residual_scale(config),
        experts=experts,
    )


def activation_of(module: nn.Module) -> Activation | None:
    """The activation that a module computes, if native operators and kernels support it."""
    return _FUNCTIONS.get(EXACT.get(type(module)))


def replace_recognised(
    model: nn.Module, make: Callable[[int, DecoderForm], nn.Module], *, with_experts: bool = False
) -> int:
    """Replace every recognised decoder layer by the module that `make` returns for its index and form.

    Replaced layers are freed at once: memory may not hold all weights twice.

    Args:
        model: changed in place.
        make: returns the new layer.
        with_experts: whether layers with experts are replaced as well.

    Returns:
        How many layers were replaced.
    """
    replaced = 0
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for place in range(len(layers)):
            form = recognise(layers[place])
            if form is not None and (with_experts or form.experts is None):
                layers[place] = make(layers[place].self_attn.layer_idx, form)  # type: ignore[arg-type, union-attr]
                replaced += 1
    return replaced


def _has_plain_parts(layer: nn.Module, family: LayerFamily, form: DecoderForm) -> bool:
    """Whether linears, experts and activations are of the family's classes: other code may have changed them."""
    linears = [*family.qkv, family.attention_output]
    activations = []
    if (mixture := family.mixture) is not None and form.experts is not None:
        experts: Any = layer.get_submodule(mixture.experts)
        router = layer.get_submodule(mixture.router)
        is_own = {type(module).__module__ for module in (experts, router)} == {type(layer).__module__}
        if not is_own or not has_usual_layout(experts) or activation_of(experts.act_fn) != form.activation:
            return False
        linears += [] if mixture.mlp_gate is None else [mixture.mlp_gate]
        family = replace(family, gate_up=mixture.gate_up, down=mixture.down, activation=mixture.activation)
    if form.down is not None:
        linears += [*family.gate_up, family.down]
        activations = [family.activation]
    return all(type(layer.get_submodule(name)) is nn.Linear for name in linears) and all(
        activation_of(layer.get_submodule(name)) == form.activation for name in activations
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
        activation=activation,
        scoring=mixture.scoring,
        normalised=mixture.normalised(config),
        scale=mixture.scale(config),
        choice_bias=None if mixture.choice_bias is None else parameters.require(mixture.choice_bias, len(router)),
        mlp_gate=None if gate is None else gate[0],
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
