"""The parts that keep rows independent: packed weights, activations, experts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import GptOssConfig, MuseSparkTextConfig, NemotronHConfig
from transformers import activations as hf
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from model_runner.config import RunnerConfig
from model_runner.modules.activations import ExactActivation, ExactFunctions, replace_activations
from model_runner.modules.experts import ExpertWeights, PackedExperts, pack_experts, packed_experts
from model_runner.modules.linears import ExactnessError, OneDNNPacker, RowRange, pack_weights, probe_row_range
from model_runner.runner import ModelRunner
from model_runner.weights.packed_weight import PackedWeight

SHAPES = [(64, 48), (100, 37), (13, 7), (576, 1536), (512, 4096), (1, 64)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class VectorCalls(TorchFunctionMode):
    """Notes for how many numbers vector functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").strip("_") in ("exp", "log", "tanh", "erf", "sin", "cos"):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_the_first_vector_function_is_called_in_one_thread(tiny_model: Callable[[str], Path]) -> None:
    with VectorCalls() as calls:
        ModelRunner.load(RunnerConfig(tiny_model("llama"), device="cpu", kv_cache_gib=0.01))
    assert len(calls.sizes) > 1
    assert calls.sizes[0] == 1


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_packed_product_is_the_product_and_independent_of_other_rows(out: int, width: int) -> None:
    weight, bias, rows = random(out, width), random(out, seed=1), random(300, width, seed=2)
    packed = PackedWeight(weight, OneDNNPacker())
    whole = F.linear(rows, packed, bias)
    exact = F.linear(rows.double(), weight.double(), bias.double())
    rounding = 4 * torch.finfo(torch.float32).eps * F.linear(rows.abs(), weight.abs(), bias.abs())
    assert ((whole - exact).abs() <= rounding).all()
    for count in (0, 1, 2, 3, 6, 13, 64, 257):
        assert torch.equal(F.linear(rows[9 : 9 + count], packed, bias), whole[9 : 9 + count])
    assert F.linear(rows.view(3, 100, width), packed).shape == (3, 100, out)


def test_probe_finds_the_rows_that_agree() -> None:
    def odd_when_alone(rows: torch.Tensor) -> torch.Tensor:
        return rows + (len(rows) < 3)

    def odd_when_many(rows: torch.Tensor) -> torch.Tensor:
        return rows + len(rows)

    def always_odd(rows: torch.Tensor) -> torch.Tensor:
        return rows + rows.mean()

    assert probe_row_range(lambda rows: rows * 2, 5) == RowRange(1)
    assert probe_row_range(odd_when_alone, 5) == RowRange(4)
    assert probe_row_range(odd_when_many, 5) == RowRange(16, 16)
    with pytest.raises(ExactnessError):
        probe_row_range(always_odd, 5)


@pytest.mark.parametrize("row_range", [RowRange(1), RowRange(4), RowRange(16, 16)])
def test_few_distinct_row_counts_reach_the_product(row_range: RowRange) -> None:
    met: set[int] = set()

    def product(rows: torch.Tensor) -> torch.Tensor:
        met.add(len(rows))
        return rows * 2

    for count in range(700):
        rows = torch.arange(count, dtype=torch.float32).view(-1, 1)
        assert torch.equal(row_range.apply(product, rows), rows * 2)
    assert len(met) <= 28
    assert min(met) == row_range.smallest
    assert max(met) == row_range.largest


def test_packed_weight_can_do_nothing_else() -> None:
    packed = PackedWeight(random(4, 4), OneDNNPacker())
    assert packed.shape == (4, 4)
    with pytest.raises(NotImplementedError, match="not supported"):
        packed @ packed


def test_pack_weights_leaves_a_shared_embedding_alone() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False), "norm": nn.LayerNorm(4)})
    model["head"].weight = model["embed"].weight
    rows = random(2, 4)
    with torch.inference_mode():
        expected = model["head"](rows)
        pack_weights(model, OneDNNPacker(), OneDNNPacker())
        torch.testing.assert_close(model["head"](rows), expected)
    assert isinstance(model["head"].weight, PackedWeight)
    assert not isinstance(model["embed"].weight, PackedWeight)


ACTIVATIONS = [
    nn.SiLU(),
    hf.SiLUActivation(),
    nn.Sigmoid(),
    hf.GELUActivation(),
    hf.GELUTanh(),
    hf.NewGELUActivation(),
    hf.FastGELUActivation(),
    hf.AccurateGELUActivation(),
    hf.QuickGELUActivation(),
    hf.ReLUSquaredActivation(),
    hf.LinearActivation(),
    nn.Tanh(),
    nn.ReLU(),
]


def places_agree(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Does each element come out the same wherever it stands?"""
    x = random(1 << 18) * 3
    whole = function(x.clone())
    return all(
        torch.equal(function(x[start : start + n].clone()), whole[start : start + n])
        for n in (1, 7, 33, 1000, 32777, 100001)
        for start in (0, 1, 5)
    )


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda module: type(module).__name__)
def test_exact_activation_is_the_activation_wherever_an_element_stands(activation: nn.Module) -> None:
    model = nn.ModuleDict({"act_fn": activation})
    x = torch.cat([random(1000) * 4, torch.tensor([0.0, -90.0, 90.0, 1e-30])])
    expected = activation(x.clone())
    replace_activations(model)
    assert isinstance(model["act_fn"], ExactActivation)
    torch.testing.assert_close(model["act_fn"](x), expected, rtol=1e-5, atol=1e-6)
    assert places_agree(model["act_fn"])


def test_the_check_of_places_can_fail() -> None:
    def odd_at_the_end(x: torch.Tensor) -> torch.Tensor:
        bulk = len(x) // 16 * 16
        return torch.cat([x[:bulk], x[bulk:] * (1 + 2**-20)])

    assert not places_agree(odd_at_the_end)


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="Mish"):
        replace_activations(nn.ModuleDict({"act_fn": hf.MishActivation()}))


class Experts(nn.Module):
    """As transformers lays them out."""

    has_gate = True

    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up = random(experts, 2 * intermediate, hidden)
        self.down = random(experts, hidden, intermediate, seed=1)
        self.packed = PackedExperts(self, ExpertWeights(self.gate_up, self.down), OneDNNPacker())

    def _apply_gate(self, gated: torch.Tensor) -> torch.Tensor:
        gate, up = gated.chunk(2, dim=-1)
        return gate.relu() * up


def test_experts_are_the_weighted_sum_and_tokens_do_not_meet() -> None:
    module, hidden = Experts(5, 24, 20), random(40, 24, seed=3)
    weights, index = random(40, 5, seed=4).softmax(-1).topk(2)
    result = packed_experts(module, hidden, index, weights)
    for token in range(40):
        expected = torch.zeros(24)
        for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
            expected += module.down[expert] @ module._apply_gate(module.gate_up[expert] @ hidden[token]) * weight
        torch.testing.assert_close(result[token], expected, rtol=1e-4, atol=1e-4)
    for part in (slice(0, 1), slice(7, 20)):
        assert torch.equal(packed_experts(module, hidden[part], index[part], weights[part]), result[part])


def spelled_out(module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Transformers' own sum, computed one expert after the other."""
    with torch.no_grad():
        result: torch.Tensor = type(module).forward.__wrapped__(module, hidden, index, weights)
    return result


def other_experts(family: str) -> Any:
    """A module whose experts are stored in an unusual way."""
    sizes = {"hidden_size": 24, "num_experts_per_tok": 2}
    if family == "nemotron_h":
        config: Any = NemotronHConfig(**sizes, n_routed_experts=5, moe_intermediate_size=20, mlp_hidden_act="relu2")
        module: Any = NemotronHExperts(config)
    elif family == "muse_spark":
        of_experts = {"num_local_experts": 5, "moe_hidden_size": 24, "moe_intermediate_size": 20}
        config = MuseSparkTextConfig(**sizes, **of_experts, num_attention_heads=2)
        module = MuseSparkExperts(config)
    else:
        config = GptOssConfig(**sizes, num_local_experts=5, intermediate_size=20, swiglu_limit=1.0)
        module = GptOssExperts(config)
    for number, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=number) * 0.3
    return module


@pytest.mark.parametrize("family", ["nemotron_h", "gpt_oss", "muse_spark"])
def test_experts_of_unusual_layouts_are_those_of_transformers(family: str) -> None:
    module, hidden = other_experts(family), random(40, 24, seed=3)
    weights, index = random(40, 5, seed=4).softmax(-1).topk(2)
    expected = spelled_out(module, hidden, index, weights)
    pack_experts(nn.ModuleDict({"experts": module}), OneDNNPacker())
    with ExactFunctions():
        result = packed_experts(module, hidden, index, weights)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        for part in (slice(0, 1), slice(7, 20)):
            assert torch.equal(packed_experts(module, hidden[part], index[part], weights[part]), result[part])


def test_experts_that_transformers_does_not_let_us_run_are_refused() -> None:
    experts = nn.Module()
    experts.gate_up_proj, experts.down_proj = (nn.Parameter(torch.zeros(2, 4, 4)) for _ in range(2))
    with pytest.raises(ValueError, match=r"the layout of the experts in mlp\.experts is not supported"):
        pack_experts(nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})}), OneDNNPacker())
