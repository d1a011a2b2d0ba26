"""Experts that a family's code runs in a loop of its own, changed to the form of all other experts.

Such a loop asks which experts have tokens, so it cannot be inspected without weights. Its products also depend on how
many tokens an expert gets. In transformers' common form, the experts run by the server's functions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from model_runner.modules.head_weights import linears_of
from model_runner.modules.transformers_private import experts_name, mark_as_common

Run = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
"""A function of transformers for experts: module, hidden [T, hidden], chosen [T, k], weights [T, k] -> [T, hidden]."""


def in_common_form(
    change: Callable[[Any], None], forward: Callable[..., Tensor]
) -> Callable[[Any, PreTrainedModel], None]:
    """A change of experts to transformers' common form, in which `forward` runs them by the model's function.

    They stay as they are in models without such a function.

    Args:
        change: turns a module's weights into gate_up_proj [experts, 2 * intermediate, hidden] and down_proj.
        forward: takes the model's function, the module, and what the module's own forward takes.
    """

    def restore(module: Any, model: PreTrainedModel) -> None:
        name = experts_name(model.config.get_text_config())
        function: Run | None = ALL_EXPERTS_FUNCTIONS.get(name) if name is not None else None
        if function is not None:
            change(module)
            mark_as_common(module)
            module.forward = partial(forward, function, module)

    return restore


def run(function: Run, module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Hidden [.., hidden] -> the same shape."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    return function(module, flat, chosen, weights).view_as(hidden)


def run_with_identities(function: Run, module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """LongCat-Flash: experts from `num_routed_experts` on return their input."""
    is_real = chosen < module.num_routed_experts
    routed = function(module, hidden, chosen.where(is_real, 0), weights.where(is_real, 0.0))
    returned: Tensor = routed + hidden * weights.masked_fill(is_real, 0.0).sum(-1, keepdim=True).to(hidden.dtype)
    return returned


def change_dbrx(module: Any) -> None:
    """From w1 (gate), v1 (up) and w2 (down), each [experts * intermediate, hidden]."""
    stored = module.mlp
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    gate, up, down = (weight.data.view(shape) for weight in (stored.w1, stored.v1, stored.w2))
    module.act_fn = stored.activation_fn
    del module.mlp
    module.gate_up_proj = nn.Parameter(torch.cat([gate, up], dim=1), requires_grad=False)
    module.down_proj = nn.Parameter(down.transpose(1, 2), requires_grad=False)


def change_longcat(module: Any) -> None:
    """Its gate_up also has rows for the experts that return their input."""
    routed = module.gate_up_proj.data[: module.num_routed_experts]
    module.gate_up_proj = nn.Parameter(routed, requires_grad=False)
    module.num_experts = module.num_routed_experts


def _route_jetmoe(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The rows of all experts, sorted by expert: their ranks, tokens, weights and experts; and the router's logits."""
    logits = module.layer(hidden).float()
    highest, chosen = logits.topk(module.top_k, dim=1)
    weights = torch.softmax(highest, dim=1).to(hidden.dtype).flatten()
    experts, order = chosen.flatten().sort(stable=True)
    return order, order // module.top_k, weights[order], experts, logits


def _run_jetmoe(module: Any, rows: Tensor, experts: Tensor) -> Tensor:
    """Rows [n, in] of these experts [n] -> [n, out]."""
    outputs = rows.new_empty(len(rows), module.output_size)
    if not rows.is_meta:
        for expert in torch.unique(experts).tolist():
            own = experts == expert
            outputs[own] = module.of_expert[expert](rows[own])
    return outputs


def prepare_router(module: Any, _: PreTrainedModel) -> None:
    """JetMoe's router."""
    module.forward = partial(_route_jetmoe, module)


def prepare_experts(module: Any, _: PreTrainedModel) -> None:
    """JetMoe's experts, which its queries have, too: each is a linear layer."""
    module.of_expert = linears_of(module.weight)
    del module.weight
    module.forward = partial(_run_jetmoe, module)
