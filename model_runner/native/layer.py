"""Decoder layers and mixtures of experts with packed weights, as the native kernels take them."""

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model_runner.attention.cpu import attention_struct
from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.library import NativeWeight
from model_runner.native.packer import NativePacker
from model_runner.recurrence.cpu import BoundMixer, NativeRecurrence
from model_runner.spec.layer_family import ClampedGate
from model_runner.spec.layer_spec import Activation, AttentionSpec, ExpertsSpec, LayerSpec
from model_runner.weights.matrix import Linear

_ACTIVATIONS: dict[Activation, str] = {
    "silu": "SW_SILU",
    "gelu_tanh": "SW_GELU_TANH",
    "relu_squared": "SW_RELU_SQUARED",
}
_SCORINGS = {"softmax": "SW_SOFTMAX", "sigmoid": "SW_SIGMOID"}
_ROUTER_PANEL = 16


class NativeExperts:
    """Packed weights of all experts of one layer; implements modules.experts.ExpertsSum."""

    def __init__(
        self,
        packer: NativePacker,
        gate_up: Sequence[Linear],
        down: Sequence[Linear],
        activation: Activation | ClampedGate,
        beside: Linear | None = None,
    ) -> None:
        """Takes gate_up [2 * intermediate, hidden] and down [hidden, intermediate] of each expert.

        `beside` is gate_up of an MLP on the same rows. With `relu_squared`, gate_up is up [intermediate, hidden].
        """
        self._kernels = packer.kernels
        packed = packer.pack_alike([*gate_up, *([] if beside is None else [beside])])
        self.beside = None if beside is None else packed.pop()
        """The MLP's gate_up."""
        self._weights = [packed, packer.pack_alike(down)]
        self._arrays = [CPU.array("SwWeight", [weight.struct[0] for weight in weights]) for weights in self._weights]
        self.struct: CData = CPU.new(
            "SwExperts",
            num_experts=len(gate_up),
            **_gate(activation),
            gate_up=self._arrays[0],
            down=self._arrays[1],
        )

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.struct.top_k = chosen.shape[1]
        return self._kernels.experts(
            self.struct, hidden.contiguous(), chosen.int().contiguous(), weights.float().contiguous()
        )


class RoutedExperts(NativeExperts):
    """Experts with their router, for a decoder layer that is one operator."""

    def __init__(self, packer: NativePacker, spec: ExpertsSpec, beside: Linear | None) -> None:
        latent = self._pack_latents(packer, spec, beside)
        super().__init__(packer, spec.gate_up, spec.down, spec.activation, None if latent else beside)
        if latent:
            self._latent, self.beside = latent[:2], latent[2] if len(latent) > 2 else None
            self.struct.latent_output, self.struct.latent_input = (weight.struct[0] for weight in self._latent)
        self._router = _router_panels(spec)
        self._bias = None if spec.choice_bias is None else spec.choice_bias.float().contiguous()
        struct = self.struct
        struct.top_k = spec.top_k
        struct.scoring = CPU.constants("SwScoring")[_SCORINGS[spec.scoring]]
        struct.normalised = spec.normalised
        struct.gates_mlp = spec.mlp_gate is not None
        struct.scale = spec.scale
        struct.sum_eps = spec.sum_eps
        struct.router = pointer(self._router, *self._router.shape)
        if self._bias is not None:
            struct.choice_bias = pointer(self._bias, len(spec.gate_up))
        if spec.router_bias is not None:
            self._router_bias = F.pad(
                spec.router_bias.float(), (0, self._router.shape[0] * _ROUTER_PANEL - len(spec.router_bias))
            )
            struct.router_bias = pointer(self._router_bias, len(self._router_bias))

    @staticmethod
    def _pack_latents(packer: NativePacker, spec: ExpertsSpec, beside: Linear | None) -> list[NativeWeight]:
        """The linears after and before experts that take latents, and then `beside`, which takes the same rows."""
        if spec.latent_input is None or spec.latent_output is None:
            return []
        output = packer.pack(spec.latent_output)
        return [output, *packer.pack_alike([spec.latent_input, *([] if beside is None else [beside])])]


def _gate(activation: Activation | ClampedGate) -> dict[str, float]:
    """The fields of an SwExperts that describe the gate."""
    if isinstance(activation, ClampedGate):
        number = CPU.constants("SwActivation")["SW_CLAMPED_SILU"]
        return {"activation": number, "gate_alpha": activation.alpha, "gate_limit": activation.limit}
    return {"activation": native_activation(activation)}


def native_activation(activation: Activation) -> int:
    """The activation's number in SwActivation."""
    return CPU.constants("SwActivation")[_ACTIVATIONS[activation]]


def _router_panels(spec: ExpertsSpec) -> Tensor:
    """[outputs / 16, hidden, 16] float32: router rows of the experts, then the MLP's gate."""
    outputs = [spec.router] if spec.mlp_gate is None else [spec.router, spec.mlp_gate[None]]
    weight = torch.cat(outputs).float()  # [outputs, hidden]
    padded = F.pad(weight, (0, 0, 0, -len(weight) % _ROUTER_PANEL))
    return padded.view(-1, _ROUTER_PANEL, weight.shape[1]).transpose(1, 2).contiguous()


class NativeLayer:
    """A decoder layer: quantised linears, everything else in float32, all rows at once."""

    def __init__(self, spec: LayerSpec, packer: NativePacker) -> None:
        self.attention = spec.mixer if isinstance(spec.mixer, AttentionSpec) else None
        self.recurrent = spec.recurrent  # the struct points into the tensors of both
        self._bound: BoundMixer | None = None
        self._weights = {
            name: packer.pack(linear)
            for name, linear in (
                ("mixer_input", spec.mixer_input),
                ("mixer_output", spec.mixer_output),
                ("parallel_output", spec.parallel_output),
                ("gate_up", spec.gate_up if spec.experts is None else None),
                ("down", spec.down),
            )
            if linear is not None
        }
        self._experts = None if spec.experts is None else RoutedExperts(packer, spec.experts, spec.gate_up)
        if self._experts is not None and self._experts.beside is not None:
            self._weights["gate_up"] = self._experts.beside
        norms = spec.norms
        self._norms = {
            name: factor.float().contiguous()
            for name, factor in (
                ("attention_norm", norms.attention),
                ("attention_post_norm", norms.attention_post),
                ("mlp_norm", norms.mlp),
                ("mlp_post_norm", norms.mlp_post),
                ("query_norm", norms.query),
                ("key_norm", norms.key),
            )
            if factor is not None
        }
        self.struct = _layer_struct(spec, self._weights, self._norms)
        if self._experts is not None:
            self.struct.experts = self._experts.struct

    def twin(self) -> "NativeLayer":
        """A copy that can be bound to another cache. It shares the weights."""
        copied = copy.copy(self)
        copied.struct = CPU.new("SwDecoderLayer", self.struct[0])
        return copied

    def bind(self, cache: CData) -> None:
        """Set where the layer's keys and values are stored; call it before the first forward."""
        self.struct.cache = cache[0]

    def bind_states(self, recurrence: NativeRecurrence, indices: tuple[int, int]) -> None:
        """Set which recurrence and convolution of a cache the layer has; call it before the first forward."""
        mixer = self.recurrent
        assert mixer is not None
        self._bound = recurrence.bind(indices, lambda: mixer.parameters)
        setattr(self.struct, self._bound.field, self._bound.struct)


def _layer_struct(spec: LayerSpec, weights: dict[str, NativeWeight], norms: dict[str, Tensor]) -> CData:
    mixer = spec.mixer
    attention = (
        {"attention": attention_struct(mixer.heads, mixer.options)[0], "gates_attention": mixer.is_gated}
        if isinstance(mixer, AttentionSpec)
        else {}
    )
    return CPU.new(
        "SwDecoderLayer",
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        activation=native_activation(spec.activation),
        norm_eps=spec.norms.eps,
        residual_scale=spec.residual_scale,
        norms_together=spec.norms.heads_together,
        **attention,
        **{name: weight.struct[0] for name, weight in weights.items()},
        **{name: pointer(norm, len(norm)) for name, norm in norms.items()},
    )
