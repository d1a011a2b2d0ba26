"""Mixture of experts with packed weights: each expert multiplies the tokens routed to it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from model_runner.modules.transformers_private import gate_of, has_default_gate
from model_runner.weights.packed_weight import PackedWeight, Packer

EXPERTS_NAME = "samewise"


class ExpertsSum(Protocol):
    """The weighted sum of one layer's experts. A token's result does not depend on other tokens."""

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Hidden [tokens, hidden], chosen and weights [tokens, k] -> [tokens, hidden], added in the order of ranks."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of all experts of a module, with its own order of outputs."""

    up: Tensor  # [experts, outputs, hidden]; with a gate, it has the outputs of gate and up
    down: Tensor  # [experts, hidden, intermediate]
    up_bias: Tensor | None = None  # [experts, outputs]
    down_bias: Tensor | None = None  # [experts, hidden]


MakeExperts = Callable[[nn.Module, ExpertWeights], ExpertsSum | None]
"""Takes a module with experts and their weights; returns None if it does not support the module."""


def register_experts() -> None:
    """Register `packed_experts` with transformers as EXPERTS_NAME."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, packed_experts)


class PackedExperts:
    """Packed weights of all experts of one layer; its module applies the gate."""

    def __init__(self, module: Any, weights: ExpertWeights, pack: Packer) -> None:
        self._activate = activation_between(module)
        self._norm = module.post_expert_norm if has_own_norm(module) else None
        self._up = [PackedWeight(weight, pack) for weight in weights.up]
        self._down = [PackedWeight(weight, pack) for weight in weights.down]
        nothing = [None] * len(self._up)
        self._up_bias = nothing if weights.up_bias is None else weights.up_bias
        self._down_bias = nothing if weights.down_bias is None else weights.down_bias

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        outputs = hidden.new_empty(*chosen.shape, hidden.shape[-1])  # [tokens, k, hidden]
        for expert in torch.unique(chosen).tolist():
            token, rank = torch.where(chosen == expert)
            outputs[token, rank] = self.apply(expert, hidden[token]) * weights[token, rank, None]
        result = torch.zeros_like(hidden)
        for of_rank in outputs.unbind(1):
            result += of_rank
        return result

    def apply(self, expert: int, rows: Tensor) -> Tensor:
        """One expert's outputs [n, hidden] for rows [n, hidden]."""
        activated = self._activate(self._up[expert].linear(rows, self._up_bias[expert]))
        outputs = self._down[expert].linear(activated, self._down_bias[expert])
        return outputs if self._norm is None else self._norm(outputs)


class ScaledExperts:
    """Llama 4's experts: each gets all rows, which are zero where the router chose another one."""

    def __init__(self, experts: PackedExperts, count: int) -> None:
        self._experts = experts
        self._count = count

    def __call__(self, hidden: Tensor) -> Tensor:
        """Rows [experts * tokens, hidden] -> the same shape. Each token's sum is in the part of the first expert."""
        rows = hidden.view(self._count, -1, hidden.shape[-1])
        outputs = torch.zeros_like(rows)
        for expert, of_expert in enumerate(rows):
            (token,) = of_expert.any(-1).nonzero(as_tuple=True)
            outputs[0, token] += self._experts.apply(expert, of_expert[token])
        return outputs.view(hidden.shape)


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
    for module, weights in take_expert_weights(model):
        at_once = None if make is None else make(module, weights)
        module.packed = at_once or PackedExperts(module, weights, pack)
        if takes_all_rows(module):
            module.forward = ScaledExperts(module.packed, len(weights.up))


def takes_all_rows(module: nn.Module) -> bool:
    """Whether transformers runs the experts on all rows, each on its part of them (`classes.py`)."""
    return bool(getattr(module, "takes_all_rows", False))


def activation_between(module: Any) -> Callable[[Tensor], Tensor]:
    """The module's function between up and down: a gate, or an activation alone."""
    if not getattr(module, "has_gate", True):

        def activate(rows: Tensor) -> Tensor:
            result: Tensor = module.act_fn(rows)  # looked up now: it may have been replaced
            return result

        return activate
    return gate_of(module)


def has_usual_gate(module: Any) -> bool:
    """Whether transformers lets us run the experts, they compute activation(gate) * up, and the gate comes first.

    Experts whose outputs are normed do more than this.
    """
    is_ours = hasattr(module, "is_concatenated") and module.has_gate and module.is_concatenated
    is_ours = is_ours and not has_own_norm(module)
    return is_ours and has_default_gate(module)


def has_own_norm(module: Any) -> bool:
    """Whether each expert's outputs are normed before they are added (Muse Spark)."""
    return bool(getattr(module, "has_post_expert_norm", False))


def take_expert_weights(model: nn.Module, *, ours_alone: bool = False) -> Iterator[tuple[Any, ExpertWeights]]:
    """Yield each module with experts and their weights, which are removed from the module.

    Args:
        model: changed in place.
        ours_alone: refuses experts for which transformers calls no other function, and those that end with a norm.

    Raises:
        ValueError: if the layout of the experts is not supported.
    """
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        up = "gate_up_proj" if "gate_up_proj" in own else "up_proj"
        if up not in own or "down_proj" not in own:
            continue
        is_known = hasattr(module, "is_transposed")
        if not is_known or (ours_alone and (has_own_norm(module) or takes_all_rows(module))):
            raise ValueError(f"the layout of the experts in {name} is not supported")
        first, down = own.pop(up).data, own.pop("down_proj").data
        delattr(module, up)
        del module.down_proj
        if module.is_transposed:
            first, down = first.transpose(1, 2), down.transpose(1, 2)
        biases = (own[one].data if one in own else None for one in (f"{up}_bias", "down_proj_bias"))
        yield module, ExpertWeights(first, down, *biases)
