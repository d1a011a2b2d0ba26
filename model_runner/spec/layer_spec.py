"""The weights and settings of a decoder layer as plain data, for one native operator."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionOptions
from model_runner.kv_cache import KVShape
from model_runner.recurrence.backend import (
    GatedDeltaNetParameters,
    Mamba2Parameters,
    MixerParameters,
    ShortConvolutionParameters,
)
from model_runner.recurrence.states import ConvShape, RecurrentShape
from model_runner.spec.layer_family import (
    ClampedGate,
    Config,
    DeltaNet,
    LayerFamily,
    Mamba2,
    Mixture,
    Recurrent,
    ShortConvolution,
    head_dim,
)
from model_runner.weights.matrix import Linear, in_order, joined, scaled
from model_runner.weights.parameters import Parameters

Activation = Literal["silu", "gelu_tanh", "relu_squared"]
"""The last one is for MLPs without a gate, and all others have one."""
Scoring = Literal["softmax", "sigmoid"]

_NAMES: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu_squared",
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
    query: Tensor | None  # [head_dim], on each head before the rotation; or [heads * head_dim], on all at once
    key: Tensor | None  # likewise
    heads_together: bool = False
    """Whether the norms of queries and keys are over all heads at once."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts, each a gated MLP: the weighted sum of the `top_k` experts with the highest scores.

    An activation gates by activation(gate) * up; with `relu_squared`, experts have no gate. Experts with latents take
    and return these instead of rows.
    """

    gate_up: Sequence[Linear]  # of each expert [2 * intermediate, hidden], gate first; or up [intermediate, hidden]
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
    sum_eps: float
    """A small number that is added to the sum that normalises the weights."""
    choice_bias: Tensor | None  # [experts], added to the scores only to choose experts
    mlp_gate: Tensor | None  # [hidden]: the sigmoid of its product with a row scales the MLP's output
    router_bias: Tensor | None = None  # [experts], added to the router's logits
    latent_input: Linear | None = None  # [latent, hidden]
    latent_output: Linear | None = None  # [hidden, latent]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention with rotary positions. Its first linear has outputs for heads of queries, keys, values and gates."""

    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query, key or value."""
    options: AttentionOptions
    uses_rotary: bool
    """Whether queries and keys are rotated by position, in the leading dimensions that cos and sin cover.

    If False, the model may pass None for cos and sin.
    """
    is_gated: bool = False
    """Whether the heads' outputs are multiplied by the sigmoid of gates; only then does the linear have gates."""

    @property
    def kv(self) -> KVShape:
        """Shape of its keys and values."""
        group = self.heads // self.kv_heads
        return KVShape(self.kv_heads, self.head_dim, self.head_dim, group, self.options.reach)


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A recurrent mixer. Its first linear has these outputs:

    a gated delta net: query, key and value; z; b; a
    Mamba 2: gate; x; B; C; steps
    a short convolution: b; c; x
    """

    recurrence: RecurrentShape | None
    """None for a short convolution."""
    parameters: MixerParameters

    @property
    def convolution(self) -> ConvShape:
        """Shape of its convolution."""
        return ConvShape(*self.parameters.conv_weight.shape)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer: norm, mixer, norm, gated MLP; mixer and MLP each have a residual. It may lack one of the two.

        x = x + residual_scale * post_norm(mixer_output(mixer(mixer_input(norm(x)))))
        x = x + residual_scale * post_norm(down(activation(gate(norm(x))) * up(norm(x))))

    The mixer takes a token's row and what it keeps of earlier tokens. Next to the attention, a layer may have a
    recurrent mixer on the same rows; then the outputs of both are added. With experts, their sum is added to the MLP's
    output. A layer with experts may have no MLP.
    """

    hidden: int
    """Width of the residual stream."""
    mixer: AttentionSpec | RecurrentSpec | None
    mixer_input: Linear | None  # outputs of `mixer`, then of `parallel`
    mixer_output: Linear | None
    gate_up: Linear | None  # outputs: gate, up
    down: Linear | None
    norms: Norms
    activation: Activation
    residual_scale: float
    experts: ExpertsSpec | None = None
    parallel: RecurrentSpec | None = None
    """The recurrent mixer next to the attention."""
    parallel_output: Linear | None = None

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The recurrent mixer, if there is one."""
        return self.mixer if isinstance(self.mixer, RecurrentSpec) else self.parallel

    @property
    def uses_rotary(self) -> bool:
        """Whether the layer rotates queries and keys by position."""
        return isinstance(self.mixer, AttentionSpec) and self.mixer.uses_rotary

    @property
    def intermediate(self) -> int:
        """Width between the MLP's linears; 0 without an MLP."""
        return 0 if self.down is None else self.down.inputs


def read_layer_spec(family: LayerFamily, config: Config, layer: int, parameters: Parameters) -> LayerSpec | None:
    """The form of a layer whose family is known.

    Args:
        family: how the layer is read.
        config: the text configuration.
        layer: its index.
        parameters: the layer's weights; they note which ones are missing or have another shape.

    Returns:
        None if the configuration asks for something that is not in the common family.
    """
    activation, parts = _NAMES.get(family.activation_name(config)), family.parts(config, layer)
    if activation is None or parts is None or (activation == "relu_squared") == family.has_gate:
        return None
    mixing = _NO_MIXER if parts == "mlp" else _read_mixer(family, config, layer, parameters)
    if mixing is None:
        return None
    if isinstance(mixing.mixer, RecurrentSpec) and family.recurrent_norms is not None:
        family = replace(family, norms=family.recurrent_norms)
    if parts == "mlp":
        family = replace(family, norms=replace(family.norms, attention=None))
    elif parts == "mixer":
        family = replace(family, norms=replace(family.norms, mlp=None), gate_up=())
    experts, mixture = None, family.mixture
    if mixture is not None and parameters.has(f"{mixture.router}.weight"):
        experts = _read_experts(mixture, config, activation, parameters, has_gate=family.has_gate)
        if experts is None:
            return None
        family = _beside_experts(family, mixture, parameters)
    hidden = config.hidden_size
    gate_up = parameters.linear(family.gate_up, None, hidden) if family.gate_up else None
    gates = 2 if family.has_gate else 1
    down = None if gate_up is None else parameters.linear([family.down], hidden, gate_up.outputs // gates)
    if family.factors is not None and gate_up is not None and down is not None:
        factors, width = family.factors(config), gate_up.outputs // 2
        gate_up = scaled(gate_up, torch.tensor([factors.gate, 1.0]).repeat_interleave(width))
        down = scaled(down, torch.full((hidden,), factors.down))
    return LayerSpec(
        hidden=hidden,
        mixer=mixing.mixer,
        mixer_input=mixing.input,
        mixer_output=mixing.output,
        gate_up=gate_up,
        down=down,
        norms=_norms(family, config, mixing.mixer, parameters),
        activation=activation,
        residual_scale=family.residual_scale(config),
        experts=experts,
        parallel=mixing.parallel,
        parallel_output=mixing.parallel_output,
    )


@dataclass(frozen=True, slots=True)
class _Mixing:
    """A layer's mixer with its linears; or two mixers, whose first linears are one."""

    mixer: AttentionSpec | RecurrentSpec | None
    input: Linear | None
    output: Linear | None
    parallel: RecurrentSpec | None = None
    parallel_output: Linear | None = None


_NO_MIXER = _Mixing(None, None, None)


def _read_mixer(family: LayerFamily, config: Config, layer: int, parameters: Parameters) -> _Mixing | None:
    """None if the configuration asks for something that is not in the common family."""
    recurrent = family.recurrent
    if recurrent is not None and (family.is_side_by_side or config.layer_types[layer] in recurrent.kinds):
        mixing = _read_recurrent(recurrent, config, family.norm_eps(config), parameters)
        return _side_by_side(family, config, layer, mixing, parameters) if family.is_side_by_side else mixing
    return _read_attention(family, config, layer, parameters) if family.attends(config, layer) else None


def _side_by_side(
    family: LayerFamily, config: Config, layer: int, mixing: _Mixing | None, parameters: Parameters
) -> _Mixing | None:
    """Attention and Mamba 2 on the same rows, each with the family's factors."""
    if mixing is None:
        return None
    attention = _read_attention(family, config, layer, parameters)
    spec, recurrent = attention.mixer, mixing.mixer
    assert isinstance(spec, AttentionSpec)
    assert isinstance(recurrent, RecurrentSpec)
    if family.factors is not None and (shape := recurrent.recurrence) is not None:
        factors = family.factors(config)
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        width, state = shape.heads * shape.value_dim, shape.key_heads * shape.key_dim
        attention = _with_factors(
            attention,
            (1.0, factors.key, 1.0),
            (queries, keys, keys),
            factors.attention_input,
            factors.attention_output,
        )
        mixing = _with_factors(
            mixing,
            factors.mamba_parts,
            (width, width, state, state, shape.heads),
            factors.mamba_input,
            factors.mamba_output,
        )
    inputs = [one.input for one in (attention, mixing) if one.input is not None]
    return _Mixing(spec, joined(inputs), attention.output, recurrent, mixing.output)


def _read_attention(family: LayerFamily, config: Config, layer: int, parameters: Parameters) -> _Mixing:
    hidden, width = config.hidden_size, head_dim(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    outputs = (heads + 2 * kv_heads) * width
    sinks = None if family.sinks is None else parameters.require(family.sinks, heads).float().contiguous()
    qkv = (
        _read_gated_qkv(family, (heads, kv_heads, width), hidden, parameters)
        if family.gates_attention
        else parameters.linear(family.qkv, outputs, hidden)
    )
    spec = AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        options=AttentionOptions(
            family.scale(config),
            family.window(config, layer),
            family.softcap(config),
            sinks=sinks,
            sees_spans=family.sees_images,
        ),
        uses_rotary=family.uses_rotary(config, layer),
        is_gated=family.gates_attention,
    )
    return _Mixing(spec, qkv, parameters.linear([family.attention_output], hidden, heads * width))


def _with_factors(
    mixing: _Mixing, parts: Sequence[float], sizes: Sequence[int], of_input: float, of_output: float
) -> _Mixing:
    """A mixer with factors on its rows, on its output, and on parts of these sizes of what its first linear returns."""
    assert mixing.input is not None
    assert mixing.output is not None
    of_parts = torch.tensor(parts, dtype=torch.float32).repeat_interleave(torch.tensor(sizes))
    of_outputs = torch.full((mixing.output.outputs,), of_output)
    return replace(mixing, input=scaled(mixing.input, of_parts, of_input), output=scaled(mixing.output, of_outputs))


def _read_gated_qkv(family: LayerFamily, sizes: tuple[int, int, int], hidden: int, parameters: Parameters) -> Linear:
    """Queries, keys, values and gates. The first stored linear has a query and a gate for each head in turn."""
    heads, kv_heads, width = sizes
    query, key, value = family.qkv
    stored = parameters.linear([query], 2 * heads * width, hidden)
    queries, gates = torch.arange(2 * heads * width).view(heads, 2, width).unbind(1)
    others = parameters.linear([key, value], 2 * kv_heads * width, hidden)
    return joined([in_order(stored, queries.flatten()), others, in_order(stored, gates.flatten())])


def _read_recurrent(recurrent: Recurrent, config: Config, eps: float, parameters: Parameters) -> _Mixing | None:
    """None if the kernels do not support what the configuration asks for."""
    match recurrent:
        case DeltaNet():
            return _read_delta_net(recurrent, config, eps, parameters.below(recurrent.path))
        case Mamba2():
            return _read_mamba2(recurrent, config, eps, parameters.below(recurrent.path))
        case ShortConvolution():
            return _read_short_convolution(config, parameters.below(recurrent.path))


def _read_convolution(
    name: str, channels: int, kernel: int, own: Parameters, parts: Sequence[str] = ()
) -> tuple[Tensor, Tensor | None]:
    """Weight [channels, kernel], which a checkpoint may have in parts, and bias [channels] if there is one."""
    names = [name] if own.has(f"{name}.weight") or not parts else parts
    weight = own.require_joined([f"{one}.weight" for one in names], channels, 1, kernel)
    return weight[:, 0], own.tensor(f"{name}.bias", channels)


def _read_delta_net(net: DeltaNet, config: Config, eps: float, own: Parameters) -> _Mixing | None:
    hidden, heads, key_heads = config.hidden_size, config.linear_num_value_heads, config.linear_num_key_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    shape = RecurrentShape(heads, key_heads, key_dim, value_dim, delta=True, per_channel=False)
    keys, width = key_heads * key_dim, heads * value_dim
    qkv, gates = (keys, keys, width), (heads, heads)
    if not shape.is_whole:
        return None
    net_parameters = GatedDeltaNetParameters(
        *_read_convolution("conv1d", sum(qkv), config.linear_conv_kernel_dim, own, net.convolutions),
        a_log=own.require("A_log", heads),
        dt_bias=own.require("dt_bias", heads),
        norm=own.require(f"{net.norm}.weight", value_dim),
        norm_eps=net.norm_eps or eps,
        gain=net.gain(config),
    )
    if len(net.inputs) == 2:
        inputs = _read_by_key_head(hidden, sum(qkv), shape, own)
    else:
        outputs = {4: (sum(qkv), width, *gates), 6: (*qkv, width, *gates)}
        sizes = outputs[len(net.inputs)]
        inputs = [own.linear([name], count, hidden) for name, count in zip(net.inputs, sizes, strict=True)]
    return _Mixing(RecurrentSpec(shape, net_parameters), joined(inputs), own.linear([net.output], hidden, width))


def _read_mamba2(names: Mamba2, config: Config, eps: float, own: Parameters) -> _Mixing | None:
    sizes = (getattr(config, name) for name in (names.heads, names.groups, names.state, names.head_dim, names.kernel))
    hidden, (heads, groups, state, head_dim, kernel) = config.hidden_size, sizes
    shape = RecurrentShape(heads, groups, state, head_dim, delta=False, per_channel=False)
    width = heads * shape.value_dim
    channels = width + 2 * groups * shape.key_dim
    has_silu = _NAMES.get(getattr(config, names.activation)) == "silu"
    if not (shape.is_whole and has_silu and names.is_supported(config)):
        return None
    least, most = names.step_limits(config)
    mamba = Mamba2Parameters(
        *_read_convolution("conv1d", channels, kernel, own),
        a_log=own.require("A_log", heads),
        dt_bias=own.require("dt_bias", heads),
        d=own.require("D", heads),
        norm=own.require("norm.weight", width) if names.has_norm(config) else None,
        norm_eps=eps,
        norm_groups=groups,
        step_limits=(least, most),
    )
    inputs = own.linear(["in_proj"], width + channels + heads, hidden)
    return _Mixing(RecurrentSpec(shape, mamba), inputs, own.linear(["out_proj"], hidden, width))


def _read_short_convolution(config: Config, own: Parameters) -> _Mixing:
    hidden = config.hidden_size
    convolution = ShortConvolutionParameters(*_read_convolution("conv", hidden, config.conv_L_cache, own))
    linears = own.linear(["in_proj"], 3 * hidden, hidden), own.linear(["out_proj"], hidden, hidden)
    return _Mixing(RecurrentSpec(None, convolution), *linears)


def _read_by_key_head(hidden: int, channels: int, shape: RecurrentShape, own: Parameters) -> list[Linear]:
    """Linears for qkv, z, b and a where outputs of a key head are stored together; GGUF files have qkv and z apart."""
    width, group = shape.heads * shape.value_dim, shape.heads // shape.key_heads
    of_steps = own.linear(["in_proj_ba"], 2 * shape.heads, hidden), [group] * 2
    if own.has("in_proj_qkv.weight"):
        apart = own.linear(["in_proj_qkv"], channels, hidden), own.linear(["in_proj_z"], width, hidden)
        return [*apart, *_in_usual_order([of_steps[0]], [of_steps[1]], shape)]
    stored = own.linear(["in_proj_qkvz"], channels + width, hidden)
    sizes = [shape.key_dim] * 2 + [group * shape.value_dim] * 2
    return _in_usual_order([stored, of_steps[0]], [sizes, of_steps[1]], shape)


def _in_usual_order(inputs: Sequence[Linear], parts: Sequence[list[int]], shape: RecurrentShape) -> list[Linear]:
    """Linears that have stored the outputs of each key head together, with so many outputs of each part."""
    orders = [torch.arange(linear.outputs).view(shape.key_heads, -1) for linear in inputs]
    split = [
        [part.flatten() for part in torch.split(order, sizes, 1)] for order, sizes in zip(orders, parts, strict=True)
    ]
    return [in_order(linear, torch.cat(order)) for linear, order in zip(inputs, split, strict=True)]


def _beside_experts(family: LayerFamily, mixture: Mixture, parameters: Parameters) -> LayerFamily:
    """The family of a layer with experts: its MLP is the one next to the experts, if there is one."""
    has_mlp = mixture.gate_up != () and parameters.has(f"{mixture.down}.weight")
    return replace(family, gate_up=mixture.gate_up if has_mlp else (), down=mixture.down)


def _read_experts(
    mixture: Mixture, config: Config, activation: Activation, parameters: Parameters, *, has_gate: bool
) -> ExpertsSpec | None:
    """None if the configuration chooses experts in another way than the family."""
    top_k, hidden = config.num_experts_per_tok, config.hidden_size
    router = parameters.tensor(f"{mixture.router}.weight")
    if router is None or not mixture.is_supported(config) or not 1 <= top_k <= len(router):
        return None
    latent_input, latent_output = _read_latents(mixture, hidden, parameters)
    width = hidden if latent_input is None else latent_input.outputs
    gate_up, down = parameters.experts(mixture.experts, len(router), width, has_gate=has_gate)
    has_choice_bias = mixture.choice_bias is not None and mixture.has_choice_bias(config)
    gate = None if mixture.mlp_gate is None else parameters.tensor(f"{mixture.mlp_gate}.weight", 1, hidden)
    return ExpertsSpec(
        gate_up=gate_up,
        down=down,
        router=router,
        top_k=top_k,
        activation=mixture.gate(config) or activation,
        scoring=mixture.scoring,
        normalised=mixture.normalised(config),
        scale=mixture.scale(config),
        sum_eps=mixture.sum_eps,
        choice_bias=parameters.require(mixture.choice_bias or "", len(router)) if has_choice_bias else None,
        mlp_gate=None if gate is None else gate[0],
        router_bias=parameters.tensor(f"{mixture.router}.bias", len(router)),
        latent_input=latent_input,
        latent_output=latent_output,
    )


def _read_latents(mixture: Mixture, hidden: int, parameters: Parameters) -> tuple[Linear | None, Linear | None]:
    """The linears around experts that take latents."""
    if mixture.latent is None or not parameters.has(f"{mixture.latent[0]}.weight"):
        return None, None
    before = parameters.linear([mixture.latent[0]], None, hidden)
    return before, parameters.linear([mixture.latent[1]], hidden, before.outputs)


def _norms(
    family: LayerFamily, config: Config, mixer: AttentionSpec | RecurrentSpec | None, parameters: Parameters
) -> Norms:
    """The layer's norms. Heads have norms only if the layer has attention."""
    names, queries, keys = family.norms, 0, 0
    if isinstance(mixer, AttentionSpec):
        queries, keys = (mixer.heads, mixer.kv_heads) if names.heads_together else (1, 1)
        queries, keys = queries * mixer.head_dim, keys * mixer.head_dim
    else:
        names = replace(names, query=None, key=None, heads_together=False)
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
        eps=family.norm_eps(config),
        attention=factor(names.attention, hidden),
        attention_post=factor(names.attention_post, hidden),
        mlp=factor(names.mlp, hidden),
        mlp_post=factor(names.mlp_post, hidden),
        query=factor(names.query, queries),
        key=factor(names.key, keys),
        heads_together=names.heads_together,
    )
