"""Mixtures of experts: sums in the order of ranks that no other row can change, on every instruction set."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.library import Kernels, WeightKind
from model_runner.modules.experts import ExpertWeights, PackedExperts
from model_runner.modules.packing import prepare
from model_runner.native.layer import NativeExperts, NativeLayer
from model_runner.native.packer import NativePacker
from model_runner.spec.layer_spec import ExpertsSpec, LayerSpec
from model_runner.weights.matrix import DenseMatrix, Linear
from tests.model_runner.decoder_oracle import sum_of_experts
from tests.model_runner.kernels.conftest import ISAS
from tests.model_runner.kernels.decoder_runs import (
    FusedModel,
    OneLayer,
    agree,
    forms_of,
    layer_errors,
    served_model,
)

NUM, HIDDEN, INNER, TOP_K = 7, 64, 50, 3  # a hidden size that int4 can group, an inner one that it cannot
ROWS = 150  # more than a unit of work takes, should all go to one expert


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linears(weights: Tensor) -> list[Linear]:
    return [Linear([DenseMatrix(weight)]) for weight in weights]


def stacked(experts: Sequence[Linear]) -> Tensor:
    return torch.stack([linear.weight for linear in experts])


def some_experts(inner: int = INNER, hidden: int = HIDDEN, num: int = NUM) -> ExpertsSpec:
    return ExpertsSpec(
        gate_up=linears(random(num, 2 * inner, hidden, seed=0) * hidden**-0.5),
        down=linears(random(num, hidden, inner, seed=1) * inner**-0.5),
        router=random(num, hidden, seed=2) * hidden**-0.5,
        top_k=TOP_K,
        activation="silu",
        scoring="softmax",
        sum_eps=0.0,
        normalised=True,
        scale=1.0,
        choice_bias=None,
        mlp_gate=None,
    )


def native(experts: ExpertsSpec, packer: NativePacker) -> NativeExperts:
    return NativeExperts(packer, experts.gate_up, experts.down, experts.activation)


def choices(name: str) -> Tensor:
    """[ROWS, k] of different experts each."""
    if name == "all":
        return random(ROWS, NUM, seed=4).argsort(1)
    chosen = random(ROWS, NUM, seed=4).argsort(1)[:, :TOP_K]
    if name == "one":
        return torch.full((ROWS, 1), 5)
    if name == "the last two":
        return torch.tensor([[NUM - 1, NUM - 2], [NUM - 2, NUM - 1]]).repeat(ROWS // 2, 1)
    return chosen


ROUTINGS = ("mixed", "one", "the last two", "all")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("kind", "tolerance"), [("int8", 0.02), ("int4", 0.15)])
def test_the_weighted_sum_of_the_chosen_experts(
    kind: WeightKind, tolerance: float, routing: str, kernels: Kernels
) -> None:
    spec, rows, chosen = some_experts(), random(ROWS, HIDDEN, seed=3), choices(routing)
    weights = random(*chosen.shape, seed=5)
    result = native(spec, NativePacker(kernels, kind))(rows, chosen, weights)
    expected = sum_of_experts(spec, rows, chosen, weights)
    assert (result - expected).norm() < tolerance * expected.norm()
    spoilt = sum_of_experts(spec, rows, (chosen + 1) % NUM, weights)
    assert (result - spoilt).norm() > 2 * tolerance * expected.norm()


class Gated:
    """The attributes of a module that PackedExperts need."""

    has_gate = True

    def _apply_gate(self, gated: Tensor) -> Tensor:
        gate, up = gated.chunk(2, dim=-1)
        return gate / (1 + (-gate).exp()) * up


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_same_as_one_product_after_the_other(kind: WeightKind, kernels: Kernels) -> None:
    spec, rows, chosen = some_experts(), random(ROWS, HIDDEN, seed=3), choices("mixed")
    weights, packer = random(*chosen.shape, seed=5), NativePacker(kernels, kind)
    result = native(spec, packer)(rows, chosen, weights)
    expected = PackedExperts(Gated(), ExpertWeights(stacked(spec.gate_up), stacked(spec.down)), packer)(
        rows, chosen, weights
    )
    errors = (result - expected).norm(dim=1) / expected.norm(dim=1)
    # Activations differ in the last bit, which now and then is another integer in a quantised row.
    assert errors.median() < 2e-6
    assert errors.max() < 0.02
    other_order = native(spec, packer)(rows, chosen.flip(1), weights.flip(1))
    assert not torch.equal(other_order, result)  # or the order of ranks would not have been seen


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_do_not_meet(routing: str, kind: WeightKind, kernels: Kernels) -> None:
    experts = native(some_experts(), NativePacker(kernels, kind))
    rows, chosen = random(ROWS, HIDDEN, seed=3), choices(routing)
    weights = random(*chosen.shape, seed=5)
    whole = experts(rows, chosen, weights)
    for part in (slice(0, 1), slice(3, 8), slice(40, 149), slice(149, 150), slice(0, 0)):
        assert torch.equal(experts(rows[part], chosen[part], weights[part]), whole[part])


def test_a_row_that_is_not_finite_stays_alone(kernels: Kernels) -> None:
    experts = native(some_experts(), NativePacker(kernels, "int8"))
    rows, chosen = random(20, HIDDEN, seed=3), choices("mixed")[:20]
    weights = random(20, TOP_K, seed=5)
    whole = experts(rows, chosen, weights)
    rows[7, 5] = torch.inf
    result = experts(rows, chosen, weights)
    assert result[7].isnan().all()
    result[7] = whole[7]
    assert torch.equal(result, whole)


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "dots1", "granitemoehybrid with experts"])
def test_what_is_not_finite_stays_in_its_sequence(case: str, kernels: Kernels) -> None:
    layer = OneLayer.of(case, kernels, index=3)
    step = [(0, 0, 10), (1, 0, 10)]
    hidden = random(20, layer.width, seed=0)
    whole = layer(hidden, step)
    hidden[4, 3] = torch.nan
    result = layer(hidden, step)
    assert result[4].isnan().all()
    assert torch.equal(result[:4], whole[:4])
    assert torch.equal(result[10:], whole[10:])


def teams(library: Path) -> Sequence[Kernels]:
    """On all instruction sets of this machine, and with several numbers of threads."""
    found = []
    for isa in ISAS:
        try:
            found.append(Kernels(library, threads=2, isa=isa))
        except NoKernelsError:
            continue
    return [*found, Kernels(library, threads=1), Kernels(library, threads=3)]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_threads_and_instruction_sets_do_not_matter(kind: WeightKind, kernels_library: Path) -> None:
    rows, chosen = random(ROWS, HIDDEN, seed=3), choices("mixed")
    weights = random(*chosen.shape, seed=5)
    results = [
        native(some_experts(), NativePacker(kernels, kind))(rows, chosen, weights) for kernels in teams(kernels_library)
    ]
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("case", ["qwen2_moe", "solar_open"])
def test_routers_are_the_same_on_all_instruction_sets(case: str, kernels_library: Path) -> None:
    hidden = random(30, 48, seed=0)
    results = [OneLayer.of(case, kernels, index=3)(hidden, [(0, 0, 30)]) for kernels in teams(kernels_library)]
    assert all(torch.equal(result, results[0]) for result in results[1:])


def change_experts(change: Callable[[ExpertsSpec], ExpertsSpec]) -> Callable[[LayerSpec], LayerSpec]:
    def changed(spec: LayerSpec) -> LayerSpec:
        assert spec.experts is not None
        return replace(spec, experts=change(spec.experts))

    return changed


@pytest.mark.parametrize("sizes", [{"hidden_size": 45}, {"hidden_size": 46, "num_local_experts": 16}])
def test_routers_of_any_size(sizes: dict[str, int], kernels: Kernels) -> None:
    assert agree(layer_errors("granitemoe", NativePacker(kernels, "int8"), **sizes))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda experts: replace(experts, normalised=False),
        lambda experts: replace(experts, scale=1.0),
        lambda experts: replace(experts, scoring="softmax"),
        lambda experts: replace(experts, choice_bias=None),
        lambda experts: replace(experts, activation="gelu_tanh"),
        lambda experts: replace(experts, top_k=3),
    ],
)
def test_experts_that_compute_something_else_are_found_out(
    spoil: Callable[[ExpertsSpec], ExpertsSpec], kernels_library: Path
) -> None:
    packer = NativePacker(Kernels(kernels_library, threads=1), "int8")
    assert not agree(
        layer_errors("dots1", packer, lambda spec: spec if spec.experts is None else change_experts(spoil)(spec))
    )


def test_the_first_of_experts_with_equal_scores_are_chosen(kernels: Kernels) -> None:
    equal = change_experts(lambda experts: replace(experts, router=experts.router * 0))
    first = change_experts(
        lambda experts: replace(
            experts, router=experts.router[:2] * 0, gate_up=experts.gate_up[:2], down=experts.down[:2]
        )
    )
    hidden = random(5, 48, seed=0)
    results = [OneLayer.of("mixtral", kernels, change=change)(hidden, [(0, 0, 5)]) for change in (equal, first)]
    assert torch.equal(results[0], results[1])


def test_dense_layers_have_no_experts(kernels: Kernels) -> None:
    spec = forms_of(served_model("qwen3_moe"))[1]
    assert spec.experts is None
    assert spec.intermediate == 84
    NativeLayer(spec, NativePacker(kernels, "int8"))


def test_whole_models_in_int4(kernels: Kernels) -> None:
    sizes = {"hidden_size": 64, "head_dim": 24, "intermediate_size": 96}
    model = FusedModel("mixtral", kernels, "int4", **sizes)
    crowd = model.logits([[(0, 0, 7), (2, 0, 1)], [(0, 7, 50), (1, 0, 16), (2, 1, 5)]], seed=1)
    alone = model.logits([[(0, 0, 50)]])
    assert alone[0][:50].isfinite().all()
    assert torch.equal(alone[0][:50], crowd[0][:50])


def test_experts_of_other_layers_are_native_if_the_kernels_have_their_activation(kernels: Kernels) -> None:
    for activation, kind in (("silu", NativeExperts), ("gelu", PackedExperts)):
        model = served_model("olmoe", num_experts=4, hidden_act=activation)
        prepare(model, NativePacker(kernels, "int8"))
        assert all(isinstance(layer.mlp.experts.packed, kind) for layer in model.model.layers)
