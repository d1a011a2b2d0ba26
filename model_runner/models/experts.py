"""Mixture of experts on packed weights: each expert multiplies the tokens routed to it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from model_runner.models.packed import PackedWeight, Packer

EXPERTS_NAME = "samewise"


def register_experts() -> None:
    """Make `packed_experts` known to transformers under EXPERTS_NAME."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, packed_experts)


class PackedExperts:
    """The packed weights of all experts of one layer."""

    def __init__(self, gate_up: Tensor, down: Tensor, pack: Packer) -> None:
        """Takes gate_up [experts, 2 * intermediate, hidden] and down [experts, hidden, intermediate]."""
        self.gate_up = [PackedWeight(weight, pack) for weight in gate_up]
        self.down = [PackedWeight(weight, pack) for weight in down]


def packed_experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum of the chosen experts' outputs, added in the order of the experts.

    Args:
        module: the experts module, after `pack_experts`.
        hidden: [tokens, hidden].
        top_k_index: [tokens, k] experts of each token.
        top_k_weights: [tokens, k] their weights.

    Returns:
        [tokens, hidden].
    """
    experts = module.packed
    assert isinstance(experts, PackedExperts)
    result = torch.zeros_like(hidden)
    for expert in torch.unique(top_k_index).tolist():
        token, rank = torch.where(top_k_index == expert)
        gated = module._apply_gate(experts.gate_up[expert].linear(hidden[token]))  # type: ignore[operator]
        result[token] += experts.down[expert].linear(gated) * top_k_weights[token, rank, None]
    return result


def pack_experts(model: nn.Module, pack: Packer) -> None:
    """Pack the expert weights of every layer that has them.

    Raises:
        ValueError: as `take_expert_weights`.
    """
    for module, gate_up, down in take_expert_weights(model):
        module.packed = PackedExperts(gate_up, down, pack)


def take_expert_weights(model: nn.Module) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Each module with the weights of experts, and its gate_up and down, which are taken away from it.

    Raises:
        ValueError: if the experts are laid out in a way that is not supported.
    """
    for name, module in model.named_modules():
        gate_up, down = module._parameters.get("gate_up_proj"), module._parameters.get("down_proj")
        if gate_up is None or down is None:
            continue
        # The last of these came with transformers 5.18 or later.
        unusual = module.is_transposed or module.has_bias or getattr(module, "has_post_expert_norm", False)
        if unusual or not (module.is_concatenated and module.has_gate):
            raise ValueError(f"the layout of the experts in {name} is not supported")
        del module._parameters["gate_up_proj"], module._parameters["down_proj"]
        yield module, gate_up.data, down.data
