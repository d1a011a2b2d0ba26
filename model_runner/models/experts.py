"""Mixture of experts with packed weights: each expert multiplies the tokens routed to it."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from model_runner.models.packed import PackedWeight, Packer

EXPERTS_NAME = "samewise"


class ExpertsSum(Protocol):
    """The weighted sum of one layer's experts. A token's result does not depend on other tokens."""

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Hidden [tokens, hidden], chosen and weights [tokens, k] -> [tokens, hidden], added in the order of ranks."""
        ...


MakeExperts = Callable[[nn.Module, Tensor, Tensor], ExpertsSum | None]
"""Takes a module with experts, and its gate_up and down; returns None if it does not support the module."""


def register_experts() -> None:
    """Register `packed_experts` with transformers as EXPERTS_NAME."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, packed_experts)


class PackedExperts:
    """Packed weights of all experts of one layer; its module applies the gate."""

    def __init__(self, module: Any, gate_up: Tensor, down: Tensor, pack: Packer) -> None:
        """Takes gate_up [experts, 2 * intermediate, hidden] and down [experts, hidden, intermediate]."""
        self._apply_gate: Callable[[Tensor], Tensor] = module._apply_gate
        self._gate_up = [PackedWeight(weight, pack) for weight in gate_up]
        self._down = [PackedWeight(weight, pack) for weight in down]

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        outputs = hidden.new_empty(*chosen.shape, hidden.shape[-1])  # [tokens, k, hidden]
        for expert in torch.unique(chosen).tolist():
            token, rank = torch.where(chosen == expert)
            gated = self._apply_gate(self._gate_up[expert].linear(hidden[token]))
            outputs[token, rank] = self._down[expert].linear(gated) * weights[token, rank, None]
        result = torch.zeros_like(hidden)
        for of_rank in outputs.unbind(1):
            result += of_rank
        return result


def packed_experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum of the chosen experts' outputs, added in the order of each token's ranks.

    Args:
        module: the experts module, after `pack_experts`.
        hidden: [tokens, hidden].
        top_k_index: [tokens, k] experts of each token.
        top_k_weights: [tokens, k] their weights.

    Returns:
        [tokens, hidden].
    """
    experts: ExpertsSum = module.packed  # type: ignore[assignment]
    return experts(hidden, top_k_index, top_k_weights)


def pack_experts(model: nn.Module, pack: Packer, make: MakeExperts | None = None) -> None:
    """Pack the expert weights of every layer that has them.

    Args:
        model: changed in place.
        pack: packs single weights, for experts that `make` does not support.
        make: packs all experts of a layer at once.

    Raises:
        ValueError: if the layout of the experts is not supported.
    """
    for module, gate_up, down in take_expert_weights(model):
        at_once = None if make is None else make(module, gate_up, down)
        module.packed = at_once or PackedExperts(module, gate_up, down, pack)


def has_usual_layout(module: Any) -> bool:
    """Whether the module stores gate_up [experts, 2 * intermediate, hidden], gate first, and down.

    Down is [experts, hidden, intermediate]. There are no biases, and the gate is applied by activation and product.
    """
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    return None not in weights and _is_supported(module) and has_usual_gate(module)


def has_usual_gate(module: Any) -> bool:
    """Whether the module computes activation(gate) * up."""
    return type(module)._apply_gate is _default_apply_gate


def take_expert_weights(model: nn.Module) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yield each module with experts, its gate_up and its down; the weights are removed from the module.

    Raises:
        ValueError: if the layout of the experts is not supported.
    """
    for name, module in model.named_modules():
        gate_up, down = module._parameters.get("gate_up_proj"), module._parameters.get("down_proj")
        if gate_up is None or down is None:
            continue
        if not _is_supported(module):
            raise ValueError(f"the layout of the experts in {name} is not supported")
        del module._parameters["gate_up_proj"], module._parameters["down_proj"]
        yield module, gate_up.data, down.data


def _is_supported(module: Any) -> bool:
    # The last one needs transformers 5.18 or later.
    unusual = module.is_transposed or module.has_bias or getattr(module, "has_post_expert_norm", False)
    return not unusual and module.is_concatenated and module.has_gate
