"""Models of transformers whose parts are replaced by native operators as far as possible."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from model_runner.modules.activations import EXACT, gelu_tanh, relu_squared, replace_activations, silu
from model_runner.modules.experts import ExpertWeights, has_usual_gate, pack_experts
from model_runner.modules.latents import NativeHeads, PackedHeads, keep_latents, pack_groups
from model_runner.modules.linears import OneDNNPacker, pack_weights
from model_runner.native.layer import NativeExperts
from model_runner.native.packer import NativePacker
from model_runner.refusal import UnsupportedModelError
from model_runner.spec.layer_spec import Activation
from model_runner.weights.matrix import DenseMatrix, Linear
from model_runner.weights.packed_weight import Packer

_ACTIVATIONS: dict[Callable[[Tensor], Tensor], Activation] = {
    silu: "silu",
    gelu_tanh: "gelu_tanh",
    relu_squared: "relu_squared",
}
"""Activations that the kernels compute."""


def prepare(model: PreTrainedModel, packer: NativePacker | None) -> None:
    """Make the results of a model's rows independent of each other.

    With int4, the head is packed in int8, because its error reaches every logit.

    Args:
        model: changed in place.
        packer: packs the weights for the native kernels; None leaves them in float32.

    Raises:
        UnsupportedModelError: if a part of the model has no exact counterpart.
    """
    onednn = OneDNNPacker()
    make_heads = partial(PackedHeads, onednn) if packer is None else partial(NativeHeads, packer)
    keep_latents(model, make_heads)
    pack_groups(model, make_heads)
    if packer is not None and (head := model.get_output_embeddings()) is not None:  # type: ignore[no-untyped-call]
        pack_weights(head, packer.in_int8, onednn)
    pack: Packer = packer or onednn
    try:
        pack_experts(model, pack, None if packer is None else partial(make_native_experts, packer))
        replace_activations(model)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    pack_weights(model, pack, onednn)


def make_native_experts(packer: NativePacker, module: Any, weights: ExpertWeights) -> NativeExperts | None:
    """The experts of a module whose activation is not replaced yet; None if the kernels do not support them."""
    exact = EXACT.get(type(module.act_fn)) if has_usual_gate(module) else None
    activation = None if exact is None else _ACTIVATIONS.get(exact)
    if activation is None:
        return None
    gate_up, down = _linears(weights.up, weights.up_bias), _linears(weights.down, weights.down_bias)
    return NativeExperts(packer, gate_up, down, activation)


def _linears(weights: Tensor, biases: Tensor | None) -> list[Linear]:
    """The linear layer of each expert, of weights [experts, outputs, inputs] and biases [experts, outputs]."""
    nothing = [None] * len(weights)
    of_each = zip(weights, nothing if biases is None else biases, strict=True)
    return [Linear([DenseMatrix(weight)], bias) for weight, bias in of_each]
