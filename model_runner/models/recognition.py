"""Finds decoder layers of the common family among transformers' modules, and replaces them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from model_runner.models.activations import EXACT, gelu_tanh, relu_squared, silu
from model_runner.models.experts import has_own_norm, has_usual_gate
from model_runner.models.families import LAYER_FAMILIES
from model_runner.models.interleaved_experts import deinterleave_experts
from model_runner.models.layer_family import LayerFamily
from model_runner.models.layer_spec import Activation, AttentionSpec, LayerSpec, mixer_linears, read_layer_spec
from model_runner.models.parameters import Parameters, TensorCheckpoint

_FUNCTIONS: dict[Callable[[Tensor], Tensor] | None, Activation] = {
    silu: "silu",
    F.silu: "silu",
    gelu_tanh: "gelu_tanh",
    relu_squared: "relu_squared",
}


def recognise(layer: nn.Module) -> LayerSpec | None:
    """Read a decoder layer of a model in memory. The form shares the layer's tensors.

    Args:
        layer: as transformers loads it, in evaluation mode, before its weights and activations are replaced.

    Returns:
        The layer's form, or None if it is not exactly a layer of the common family. It may have another class, be in
        training mode, not be causal, or have other kinds of linears, experts or activations.
    """
    family = LAYER_FAMILIES.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
    if family is None or layer.training or not getattr(getattr(layer, "self_attn", None), "is_causal", True):
        return None
    tensors = {name: parameter.detach() for name, parameter in layer.named_parameters()} | dict(layer.named_buffers())
    checkpoint = deinterleave_experts(TensorCheckpoint(tensors))
    config, index = _found(layer, "config"), _found(layer, "layer_idx")
    spec = None if config is None else read_layer_spec(family, config, index, Parameters(checkpoint))
    return spec if spec is not None and _has_plain_parts(layer, family, spec) else None


def activation_of(module: nn.Module | Callable[[Tensor], Tensor]) -> Activation | None:
    """The activation that a module or function computes, if native operators and kernels support it."""
    return _FUNCTIONS.get(EXACT.get(type(module)) if isinstance(module, nn.Module) else module)


def replace_recognised(
    model: nn.Module, make: Callable[[int, LayerSpec], nn.Module], *, only_common: bool = True
) -> int:
    """Replace every recognised decoder layer by the module that `make` returns for its index and form.

    Replaced layers are freed at once: memory may not hold all weights twice.

    Args:
        model: changed in place.
        make: returns the new layer.
        only_common: whether layers with experts, gated attention or recurrences stay.

    Returns:
        How many layers were replaced.
    """
    replaced = 0
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for place in range(len(layers)):
            spec = recognise(layers[place])
            if spec is not None and not (only_common and _is_special(spec)):
                made = make(_found(layers[place], "layer_idx"), spec)
                # Nemotron-H's model reads it:
                made.block_type = getattr(layers[place], "block_type", None)  # type: ignore[assignment]
                layers[place] = made
                replaced += 1
    return replaced


def _found(layer: nn.Module, name: str) -> Any:
    """An attribute of the layer's attention, or of other modules; None if none has it."""
    return next((getattr(module, name) for module in layer.modules() if hasattr(module, name)), None)


def _is_special(spec: LayerSpec) -> bool:
    is_plain = isinstance(spec.mixer, AttentionSpec) and not spec.mixer.is_gated and spec.parallel is None
    return spec.experts is not None or not is_plain or spec.norms.heads_together


def _has_usual_gate(experts: Any, activation: Activation) -> bool:
    """Whether experts compute activation(gate) * up, or the activation alone where that is the family's way."""
    is_gated = activation != "relu_squared"
    is_plain = has_usual_gate(experts) if is_gated else not (experts.has_gate or has_own_norm(experts))
    is_plain = is_plain and not (experts.is_transposed or experts.has_bias)
    return is_plain and activation_of(experts.act_fn) == activation


def _has_plain_parts(layer: nn.Module, family: LayerFamily, spec: LayerSpec) -> bool:
    """Whether linears, experts and activations are of the family's classes: other code may have changed them."""
    linears = list(mixer_linears(family, spec))
    activations = []
    if (mixture := family.mixture) is not None and spec.experts is not None:
        experts: Any = layer.get_submodule(mixture.experts)
        router = layer.get_submodule(mixture.router)
        is_own = {type(module).__module__ for module in (experts, router)} == {type(layer).__module__}
        if not is_own or not (mixture.gate(experts.config) or _has_usual_gate(experts, spec.activation)):
            return False
        linears += [] if mixture.mlp_gate is None else [mixture.mlp_gate]
        linears += [] if spec.experts.latent_input is None else (mixture.latent or ())
        family = replace(family, gate_up=mixture.gate_up, down=mixture.down, activation=mixture.activation)
    if spec.down is not None:
        linears += [*family.gate_up, family.down]
        activations = [] if family.activation is None else [family.activation]
    return all(type(layer.get_submodule(name)) is nn.Linear for name in linears) and all(
        activation_of(layer.get_submodule(name)) == spec.activation for name in activations
    )
