"""Mixtures of experts by the native kernels."""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_runner.kernels.library import NativeWeight
from model_runner.kernels.structs import ExpertsStruct, WeightStruct
from model_runner.models.decoder_form import Activation, Experts, activation_of
from model_runner.models.experts import has_usual_gate
from model_runner.models.packed import NativePacker

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
_SCORINGS = {"softmax": 0, "sigmoid": 1}
_ROUTER_PANEL = 16


class NativeExperts:
    """All experts of one layer, packed: an experts.ExpertsSum."""

    def __init__(self, packer: NativePacker, gate_up: Tensor, down: Tensor, activation: Activation) -> None:
        """Takes gate_up [experts, 2 * intermediate, hidden] and down [experts, hidden, intermediate]."""
        self._kernels = packer.kernels
        self._weights = [[packer.pack(weight) for weight in weights] for weights in (gate_up, down)]
        self._arrays = [_array(weights) for weights in self._weights]
        self.struct = ExpertsStruct(
            num_experts=len(gate_up),
            activation=ACTIVATIONS[activation],
            gate_up=ctypes.addressof(self._arrays[0]),
            down=ctypes.addressof(self._arrays[1]),
        )

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See experts.ExpertsSum."""
        self.struct.top_k = chosen.shape[1]
        return self._kernels.experts(
            self.struct, hidden.contiguous(), chosen.int().contiguous(), weights.float().contiguous()
        )


class RoutedExperts(NativeExperts):
    """The same with their router, for a decoder layer that is one operator."""

    def __init__(self, packer: NativePacker, form: Experts) -> None:
        super().__init__(packer, form.gate_up, form.down, form.activation)
        self._router = _router_panels(form)
        self._bias = None if form.choice_bias is None else form.choice_bias.float().contiguous()
        struct = self.struct
        struct.top_k = form.top_k
        struct.scoring = _SCORINGS[form.scoring]
        struct.normalised = form.normalised
        struct.gates_mlp = form.mlp_gate is not None
        struct.scale = form.scale
        struct.router = self._router.data_ptr()
        struct.choice_bias = None if self._bias is None else self._bias.data_ptr()


def make_native_experts(packer: NativePacker, module: Any, gate_up: Tensor, down: Tensor) -> NativeExperts | None:
    """The experts of a module whose activation is not replaced yet; None if the kernels lack it. See MakeExperts."""
    act_fn = getattr(module, "act_fn", None)
    activation = activation_of(act_fn) if isinstance(act_fn, nn.Module) and has_usual_gate(module) else None
    return None if activation is None else NativeExperts(packer, gate_up, down, activation)


def _array(weights: list[NativeWeight]) -> "ctypes.Array[WeightStruct]":
    return (WeightStruct * len(weights))(*(weight.struct for weight in weights))


def _router_panels(form: Experts) -> Tensor:
    """[outputs / 16, hidden, 16] float32, of the experts and then the MLP's gate."""
    outputs = [form.router] if form.mlp_gate is None else [form.router, form.mlp_gate[None]]
    weight = torch.cat(outputs).float()  # [outputs, hidden]
    padded = F.pad(weight, (0, 0, 0, -len(weight) % _ROUTER_PANEL))
    return padded.view(-1, _ROUTER_PANEL, weight.shape[1]).transpose(1, 2).contiguous()
