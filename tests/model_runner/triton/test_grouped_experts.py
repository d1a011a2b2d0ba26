"""Experts on CUDA: each token's weighted sum of its own experts, whatever the other tokens chose."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from model_runner.cuda.linear import (
    GROUPED_EXPERTS_NAME,
    Fp8Product,
    GpuWeightKind,
    GroupedExperts,
    Int4Product,
    group_experts,
    grouped_experts,
    make_tiled_product,
    register_grouped_experts,
)
from model_runner.kernels.triton.linear import ExpertRows
from model_runner.modules.experts import ExpertWeights
from tests.conftest import tiny_config
from tests.model_runner.triton.linear_oracle import check_product, random

EXPERTS, OUT, WIDTH = 5, 40, 96
ROUTINGS = {
    "all": [3, 1, 4, 2, 6],
    "one": [0, 0, 9, 0, 0],
    "the last": [0, 0, 0, 0, 3],
    "more than a tile": [1, 0, 150, 0, 2],
}


def starts_of(counts: list[int], device: torch.device) -> ExpertRows:
    return ExpertRows(torch.tensor([0, *counts], device=device).cumsum(0).int())


@pytest.mark.parametrize("kind", [None, "fp8", "int4"])
@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=list(ROUTINGS))
def test_each_row_meets_its_own_expert(counts: list[int], kind: GpuWeightKind | None, device: torch.device) -> None:
    weight = random(EXPERTS, OUT, WIDTH, seed=0, device=device, dtype=torch.bfloat16)
    rows = random(sum(counts), WIDTH, seed=1, device=device, dtype=torch.bfloat16)
    result = make_tiled_product(weight, kind)(rows, experts=starts_of(counts, device))
    parts = zip(result.split(counts), rows.split(counts), weight, strict=True)
    for its_result, its_rows, its_weight in parts:
        # The product with one weight has its own tests; both have tiles of 64 rows and 32 outputs here.
        assert torch.equal(its_result, make_tiled_product(its_weight, kind)(its_rows))
        if kind is None:
            check_product(its_result, its_rows, its_weight)


def test_bias_and_residual_of_grouped_rows_and_float32(device: torch.device) -> None:
    weight, rows = random(2, 40, 72, seed=0, device=device), random(5, 72, seed=1, device=device)
    residual = random(5, 40, seed=2, device=device)
    result = make_tiled_product(weight, None)(rows, residual=residual, experts=starts_of([2, 3], device))
    check_product(result[:2], rows[:2], weight[0], (residual[:2],), sum_error=1e-6)
    check_product(result[2:], rows[2:], weight[1], (residual[2:],), sum_error=1e-6)


class Module(nn.Module):
    """As transformers lays them out."""

    has_gate = True

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, kind: GpuWeightKind | None) -> None:
        super().__init__()
        self.grouped = GroupedExperts(ExpertWeights(gate_up, down), kind)

    def _apply_gate(self, gated: torch.Tensor) -> torch.Tensor:
        gate, up = gated.chunk(2, dim=-1)
        return gate.relu() * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_are_the_weighted_sum_and_tokens_do_not_meet(dtype: torch.dtype, device: torch.device) -> None:
    gate_up = random(EXPERTS, 40, 24, seed=0, device=device, dtype=dtype)
    down = random(EXPERTS, 24, 20, seed=1, device=device, dtype=dtype)
    module, hidden = Module(gate_up, down, None), random(40, 24, seed=3, device=device, dtype=dtype)
    weights, index = random(40, EXPERTS, seed=4, device=device).softmax(-1).topk(2)
    result = grouped_experts(module, hidden, index, weights)
    expected = torch.zeros(40, 24, dtype=torch.float64, device=device)
    for token in range(40):
        for expert, weight in zip(index[token].tolist(), weights[token].double(), strict=True):
            gated = module._apply_gate(gate_up[expert].double() @ hidden[token].double())
            expected[token] += down[expert].double() @ gated * weight
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance * float(expected.std()))
    for part in (slice(0, 1), slice(7, 20), slice(39, 40)):
        assert torch.equal(grouped_experts(module, hidden[part], index[part], weights[part]), result[part])


def test_no_tokens(device: torch.device) -> None:
    weights = random(2, 8, 4, seed=0, device=device), random(2, 4, 4, seed=0, device=device)
    empty = torch.empty(0, 4, device=device)
    routing = torch.empty(0, 2, dtype=torch.int64, device=device), torch.empty(0, 2, device=device)
    assert grouped_experts(Module(*weights, None), empty, *routing).shape == (0, 4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_models_run_as_with_transformers_own_experts(family: str, device: torch.device) -> None:
    register_grouped_experts()
    torch.manual_seed(0)
    models = []
    for experts in ("eager", GROUPED_EXPERTS_NAME):
        config = tiny_config(family)
        config.num_hidden_layers = 1
        models.append(AutoModelForCausalLM.from_config(config, experts_implementation=experts).eval().to(device))
    eager, ours = models
    ours.load_state_dict(eager.state_dict())
    group_experts(ours, None)
    tokens = torch.arange(3, 40, device=device)[None]
    with torch.inference_mode():
        torch.testing.assert_close(ours(tokens).logits, eager(tokens).logits, rtol=1e-4, atol=1e-4)


def test_kinds_of_weights(device: torch.device) -> None:
    weights = random(2, 64, 128, seed=0, device=device), random(2, 128, 32, seed=0, device=device)
    assert isinstance(GroupedExperts(ExpertWeights(*weights), "fp8").down, Fp8Product)
    assert isinstance(GroupedExperts(ExpertWeights(*weights), "int4").down, Int4Product)


def test_unusual_layouts_are_refused(device: torch.device) -> None:
    module = nn.Module()
    module.gate_up_proj, module.down_proj = (nn.Parameter(torch.zeros(2, 4, 4, device=device)) for _ in range(2))
    module.is_transposed, module.has_bias, module.has_post_expert_norm = False, False, True
    module.is_concatenated = module.has_gate = True
    with pytest.raises(ValueError, match=r"layout of the experts in mlp\.experts is not supported"):
        group_experts(nn.ModuleDict({"mlp": nn.ModuleDict({"experts": module})}), None)
