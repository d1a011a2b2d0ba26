"""A decoder layer of the common family as plain data, for one native operator to run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from model_runner.attention.backend import AttentionOptions
from model_runner.models.activations import EXACT, gelu_tanh, silu
from model_runner.models.experts import has_usual_layout
from model_runner.models.families import LAYER_FAMILIES, LayerFamily, Mixture

Activation = Literal["silu", "gelu_tanh"]
Scoring = Literal["softmax", "sigmoid"]

_NAMES: dict[Callable[[Tensor], Tensor] | None, Activation] = {silu: "silu", gelu_tanh: "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]


@dataclass(frozen=True, slots=True)
class Norms:
    """The factors of a layer's RMS norms: x becomes x / sqrt(mean(x²) + eps) * factor. None where there is no norm."""

    eps: float
    attention: Tensor | None  # [hidden], on the attention's input
    attention_post: Tensor | None  # [hidden], on the attention's output
    mlp: Tensor | None  # [hidden], on the MLP's input
    mlp_post: Tensor | None  # [hidden], on the MLP's output
    query: Tensor | None  # [head_dim], on each head before the rotation
    key: Tensor | None  # [head_dim], likewise


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, each a gated MLP: the sum of what the `top_k` with the highest scores make of a row."""

    gate_up: Tensor  # [experts, 2 * intermediate, hidden], gate first
    down: Tensor  # [experts, hidden, intermediate]
    router: Tensor  # [experts, hidden]
    top_k: int
    activation: Activation
    scoring: Scoring
    """Scores are the softmax over all experts, or each one's sigmoid. They are the weights of the sum, ..."""
    normalised: bool
    """... divided by their own sum, where True, ..."""
    scale: float
    """... and multiplied with this."""
    choice_bias: Tensor | None  # [experts], added to the scores for the choice only
    mlp_gate: Tensor | None  # [hidden]: the sigmoid of its product with a row is a factor on what the layer's MLP adds


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """A decoder layer: norm, attention with rotary positions, norm, gated MLP, each of the two with its residual.

    With experts, their sum is added to what the MLP makes of the same rows. Where there is no MLP beside them, gate, up
    and down are of width 0.

        x = x + residual_scale * post_norm(attention(norm(x)))
        x = x + residual_scale * post_norm(down(activation(gate(norm(x))) * up(norm(x))))

    The tensors share their memory with the module that was read, but for what was merged or added to.
    """

    heads: int
    kv_heads: int
    qkv: Linear  # outputs: heads of queries, of keys, of values
    attention_output: Linear
    gate: Linear
    up: Linear
    down: Linear
    norms: Norms
    activation: Activation
    attention: AttentionOptions
    uses_rotary: bool
    """Queries and keys are rotated by their position, in the leading dimensions that cos and sin cover.

    Where False, the model may pass None for cos and sin.
    """
    residual_scale: float
    experts: Experts | None = None

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.qkv.weight.shape[1]

    @property
    def gate_up(self) -> Linear:
        """Both in one, gate first; a copy."""
        biases = [linear.bias for linear in (self.gate, self.up) if linear.bias is not None]
        return Linear(torch.cat([self.gate.weight, self.up.weight]), torch.cat(biases) if biases else None)

    @property
    def intermediate(self) -> int:
        """Width between the MLP's linears."""
        return self.gate.weight.shape[0]

    @property
    def head_dim(self) -> int:
        """Width of a query, key or value."""
        return self.qkv.weight.shape[0] // (self.heads + 2 * self.kv_heads)


def recognise(layer: nn.Module) -> DecoderForm | None:
    """Read a decoder layer.

    Args:
        layer: as transformers loads it, in evaluation mode, its weights and activations not yet replaced.

    Returns:
        What the layer computes, or None if it is not exactly a layer of the common family: of a class that is not in
        the table, in training mode, not causal, with linears, experts or an activation of another kind.
    """
    family = LAYER_FAMILIES.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
    if family is None or layer.training or not _attends_plainly(layer, family):
        return None
    experts, mixture = None, family.mixture
    if mixture is not None and _has_submodule(layer, mixture.experts):
        if (experts := _read_experts(layer, mixture)) is None:
            return None
        family = _beside_experts(layer, family, mixture)
    activation = activation_of(layer.get_submodule(family.activation))
    linears = [*family.qkv, family.attention_output, *family.gate_up, *filter(None, [family.down])]
    # Quantised checkpoints come with linears of other classes.
    if activation is None or any(type(layer.get_submodule(name)) is not nn.Linear for name in linears):
        return None
    return _read(layer, family, activation, experts)


def activation_of(module: nn.Module) -> Activation | None:
    """What an activation computes, if the native operators and the kernels have it."""
    return _NAMES.get(EXACT.get(type(module)))


def replace_recognised(
    model: nn.Module, make: Callable[[int, DecoderForm], nn.Module], *, with_experts: bool = False
) -> int:
    """Put what `make` makes of its index and form in place of every decoder layer that is recognised.

    Nothing keeps a layer that was replaced: there may be no memory for all weights twice.

    Args:
        model: changed in place.
        make: gives the new layer.
        with_experts: layers with experts are replaced, too.

    Returns:
        How many were.
    """
    replaced = 0
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for place in range(len(layers)):
            form = recognise(layers[place])
            if form is not None and (with_experts or form.experts is None):
                layers[place] = make(layers[place].self_attn.layer_idx, form)  # type: ignore[arg-type, union-attr]
                replaced += 1
    return replaced


def _attends_plainly(layer: Any, family: LayerFamily) -> bool:
    return family.attends(layer) and layer.self_attn.is_causal


def _has_submodule(layer: nn.Module, name: str) -> bool:
    try:
        layer.get_submodule(name)
    except AttributeError:
        return False
    return True


def _beside_experts(layer: nn.Module, family: LayerFamily, mixture: Mixture) -> LayerFamily:
    """The family of a layer with experts: its MLP is the one beside them, if there is one."""
    has_mlp = mixture.gate_up != () and _has_submodule(layer, mixture.down)
    if not has_mlp:
        return replace(family, gate_up=(), down="", activation=f"{mixture.experts}.act_fn")
    return replace(family, gate_up=mixture.gate_up, down=mixture.down, activation=mixture.activation)


def _read_experts(layer: nn.Module, mixture: Mixture) -> Experts | None:
    """None if they are not exactly what the family's experts are."""
    experts: Any = layer.get_submodule(mixture.experts)
    router: Any = layer.get_submodule(mixture.router)
    activation = activation_of(experts.act_fn)
    is_own = {type(module).__module__ for module in (experts, router)} == {type(layer).__module__}
    if not is_own or activation is None or not has_usual_layout(experts) or not mixture.is_plain(router):
        return None
    gate: Any = None if mixture.mlp_gate is None else layer.get_submodule(mixture.mlp_gate)
    if gate is not None and type(gate) is not nn.Linear:
        return None
    if not 1 <= router.top_k <= len(router.weight) == len(experts.gate_up_proj):
        return None
    bias = mixture.choice_bias(router)
    return Experts(
        gate_up=experts.gate_up_proj.detach(),
        down=experts.down_proj.detach(),
        router=router.weight.detach(),
        top_k=router.top_k,
        activation=activation,
        scoring=mixture.scoring,
        normalised=mixture.normalised(router),
        scale=mixture.scale(router),
        choice_bias=None if bias is None else bias.detach(),
        mlp_gate=None if gate is None else gate.weight.detach()[0],
    )


def _read(layer: Any, family: LayerFamily, activation: Activation, experts: Experts | None) -> DecoderForm:
    """The form of a layer that is known to be of the family."""
    attention = layer.self_attn
    gate, up, down = _mlp(layer, family)
    return DecoderForm(
        heads=attention.config.num_attention_heads,
        kv_heads=attention.config.num_key_value_heads,
        qkv=_merge([layer.get_submodule(name) for name in family.qkv]),
        attention_output=_linear(layer.get_submodule(family.attention_output)),
        gate=gate,
        up=up,
        down=down,
        norms=_norms(layer, family),
        activation=activation,
        attention=AttentionOptions(attention.scaling, family.window(layer), family.softcap(layer)),
        uses_rotary=family.uses_rotary(layer),
        residual_scale=family.residual_scale(layer),
        experts=experts,
    )


def _mlp(layer: Any, family: LayerFamily) -> tuple[Linear, Linear, Linear]:
    """Gate, up and down; of width 0 if the family names none."""
    if not family.gate_up:
        hidden = layer.get_submodule(family.attention_output).weight.shape[0]
        nothing = Linear(torch.empty(0, hidden), None)
        return nothing, nothing, Linear(torch.empty(hidden, 0), None)
    gate, up = _gate_and_up([layer.get_submodule(name) for name in family.gate_up])
    return gate, up, _linear(layer.get_submodule(family.down))


def _norms(layer: Any, family: LayerFamily) -> Norms:
    def factor(name: str | None) -> Tensor | None:
        norm = nn.Identity() if name is None else layer.get_submodule(name)
        if isinstance(norm, nn.Identity):
            return None
        weight: Tensor = norm.weight.detach()
        return 1 + weight.float() if family.norm_adds_one else weight  # as the norm does: bfloat16 has 8 bits

    names = family.norms
    return Norms(
        eps=layer.self_attn.config.rms_norm_eps,
        attention=factor(names.attention),
        attention_post=factor(names.attention_post),
        mlp=factor(names.mlp),
        mlp_post=factor(names.mlp_post),
        query=factor(names.query),
        key=factor(names.key),
    )


def _linear(module: Any) -> Linear:
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _merge(modules: list[Any]) -> Linear:
    """All outputs, one module's after the other's."""
    linears = [_linear(module) for module in modules]
    if len(linears) == 1:
        return linears[0]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Linear(torch.cat([linear.weight for linear in linears]), torch.cat(biases) if biases else None)


def _gate_and_up(modules: list[Any]) -> tuple[Linear, Linear]:
    """Gate and up, which may be the halves of one module."""
    linears = [_linear(module) for module in modules]
    if len(linears) == 1:
        weights = linears[0].weight.chunk(2)
        biases = (None, None) if linears[0].bias is None else linears[0].bias.chunk(2)
        linears = [Linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    gate, up = linears
    return gate, up
