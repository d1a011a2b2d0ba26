"""Mixture of experts on CUDA: rows are sorted by expert, and one launch multiplies each with its own expert's weight.

Nothing here waits for the GPU or has a size that depends on the routing, so it can be captured in a CUDA graph.
"""

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from model_runner.kernels.triton.expert_sum import expert_sum
from model_runner.kernels.triton.linear import Experts
from model_runner.models.cuda_linear import GpuWeightKind, make_tiled_product
from model_runner.models.experts import take_expert_weights

GROUPED_EXPERTS_NAME = "samewise_grouped"


def register_grouped_experts() -> None:
    """Make `grouped_experts` known to transformers under GROUPED_EXPERTS_NAME, if nothing is: see compile_layers."""
    if GROUPED_EXPERTS_NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(GROUPED_EXPERTS_NAME, grouped_experts)


class GroupedExperts:
    """The weights of all experts of one layer."""

    def __init__(self, gate_up: Tensor, down: Tensor, kind: GpuWeightKind | None, *, one_shape: bool = False) -> None:
        """Takes gate_up [experts, 2 * intermediate, hidden] and down [experts, hidden, intermediate]."""
        self.gate_up = make_tiled_product(gate_up, kind, one_shape=one_shape)
        self.down = make_tiled_product(down, kind, one_shape=one_shape)
        self.bounds = torch.arange(len(gate_up) + 1, device=gate_up.device)


def grouped_experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum of the chosen experts' outputs, added in the order of each token's ranks.

    A token's result depends on no other token: neither its products nor its sum know where the others stand.

    Args:
        module: the experts module, after `group_experts`.
        hidden: [tokens, hidden].
        top_k_index: [tokens, k] experts of each token.
        top_k_weights: [tokens, k] their weights.

    Returns:
        [tokens, hidden].
    """
    grouped = module.grouped
    assert isinstance(grouped, GroupedExperts)
    index = top_k_index.reshape(-1)
    sorted_index, order = index.sort(stable=True)
    experts = Experts(torch.searchsorted(sorted_index, grouped.bounds.to(index.dtype), out_int32=True))
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    rows = hidden[order // top_k_index.shape[1]]  # [tokens * k, hidden]
    gated = module._apply_gate(grouped.gate_up(rows, experts=experts))  # type: ignore[operator]
    outputs = grouped.down(gated, experts=experts)
    return expert_sum(
        outputs, places.view(top_k_index.shape), top_k_weights.contiguous(), hidden.new_empty(hidden.shape)
    )


def group_experts(model: nn.Module, kind: GpuWeightKind | None, *, one_shape: bool = False) -> None:
    """Prepare the experts of every layer that has them.

    Raises:
        ValueError: if the experts are laid out in a way that is not supported.
    """
    for module, gate_up, down in take_expert_weights(model):
        module.grouped = GroupedExperts(gate_up, down, kind, one_shape=one_shape)
