"""The weights and settings of a common decoder layer as plain data, for one native operator."""

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

    gate_up: Tensor  # [experts, 2 * intermediate, hidden], gate first
    down: Tensor  # [experts, hidden, intermediate]
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

    With experts, their sum is added to the MLP's output. A layer with experts but no MLP has gate, up and down of
    width 0.

    The tensors share memory with the module they were read from, except merged or modified ones.
    """

    heads: int
    kv_heads: int
    qkv: Linear  # outputs: query heads, key heads, value heads
    attention_output: Linear
    gate: Linear
    up: Linear
    down: Linear
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
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.qkv.weight.shape[1]

    @property
    def gate_up(self) -> Linear:
        """Gate and up in one linear layer, gate first; a copy."""
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
        layer: as transformers loads it, in evaluation mode, before its weights and activations are replaced.

    Returns:
        The layer's form, or None if it is not exactly a layer of the common family. It may have another class, be in
        training mode, not be causal, or have other kinds of linears, experts or activations.
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
    # Quantised checkpoints have other linear classes.
    if activation is None or any(type(layer.get_submodule(name)) is not nn.Linear for name in linears):
        return None
    return _read(layer, family, activation, experts)


def activation_of(module: nn.Module) -> Activation | None:
    """The activation that a module computes, if native operators and kernels support it."""
    return _NAMES.get(EXACT.get(type(module)))


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


def _attends_plainly(layer: Any, family: LayerFamily) -> bool:
    return family.attends(layer) and layer.self_attn.is_causal


def _has_submodule(layer: nn.Module, name: str) -> bool:
    try:
        layer.get_submodule(name)
    except AttributeError:
        return False
    return True


def _beside_experts(layer: nn.Module, family: LayerFamily, mixture: Mixture) -> LayerFamily:
    """The family of a layer with experts: its MLP is the one next to the experts, if there is one."""
    has_mlp = mixture.gate_up != () and _has_submodule(layer, mixture.down)
    if not has_mlp:
        return replace(family, gate_up=(), down="", activation=f"{mixture.experts}.act_fn")
    return replace(family, gate_up=mixture.gate_up, down=mixture.down, activation=mixture.activation)


def _read_experts(layer: nn.Module, mixture: Mixture) -> ExpertsForm | None:
    """None if the experts are not exactly as the family describes them."""
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
    return ExpertsForm(
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


def _read(layer: Any, family: LayerFamily, activation: Activation, experts: ExpertsForm | None) -> DecoderForm:
    """The form of a layer whose family is known."""
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
    """Gate, up and down; of width 0 if the family has no MLP here."""
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
        # In float32, as the norm computes it: bfloat16 would round 1 + weight to 8 bits.
        return 1 + weight.float() if family.norm_adds_one else weight

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
    """One linear layer with the outputs of all modules, in order."""
    linears = [_linear(module) for module in modules]
    if len(linears) == 1:
        return linears[0]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Linear(torch.cat([linear.weight for linear in linears]), torch.cat(biases) if biases else None)


def _gate_and_up(modules: list[Any]) -> tuple[Linear, Linear]:
    """Gate and up, which may be two halves of one module."""
    linears = [_linear(module) for module in modules]
    if len(linears) == 1:
        weights = linears[0].weight.chunk(2)
        biases = (None, None) if linears[0].bias is None else linears[0].bias.chunk(2)
        linears = [Linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    gate, up = linears
    return gate, up
