"""The native linear against its definition, and its independence from the other rows, the threads and the machine."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_runner.kernels.library import WIDEST_ROTATED, Kernels, NativeWeight, WeightKind
from model_runner.modules.latents import NativeHeads
from model_runner.native import packer as native_packer
from model_runner.native.packer import NativePacker
from model_runner.weights.matrix import DenseMatrix, Linear
from model_runner.weights.packed_weight import PackedWeight
from tests.model_runner.kernels import int4_oracle, int8_oracle, rotated_oracle

OUTPUTS = (1, 15, 16, 17, 100)
INT8_INPUTS = (1, 3, 4, 5, 63, 64, 65, 576, 1536)
SHAPES: list[tuple[WeightKind, int]] = [
    *(("int8", inputs) for inputs in INT8_INPUTS),
    *(("int8_rotated", inputs) for inputs in (1, 63, 64, 65, 192, 576, 1536)),
    *(("int4", inputs) for inputs in (32, 64, 96, 576, 1536)),
]
"""Kinds of weights, and numbers of inputs."""
EACH: list[tuple[WeightKind, int]] = [("int8", 65), ("int8_rotated", 65), ("int4", 64)]
COUNTS = (0, 1, 2, 5, 6, 7, 13, 20, 21, 22, 23, 119, 120, 121)
LARGEST = torch.finfo(torch.float32).max


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_product(
    kernels: Kernels, kind: WeightKind, weight: Tensor, rows: Tensor, bias: Tensor | None = None
) -> NativeWeight:
    """Multiply and compare with the oracle of the kind; returns the packed weight."""
    packed = kernels.pack(kind, weight, bias)
    if kind == "int4":
        expected, error = int4_oracle.linear(rows, packed, bias)
    else:
        oracle = int8_oracle if kind == "int8" else rotated_oracle
        expected, error = oracle.linear(rows, weight, bias)
    assert (np.abs(kernels.linear(packed, rows).double().numpy() - expected) <= error).all()
    return packed


def rows_are_independent(product: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    """Whether rows are the same with any other rows before, between or after them."""
    whole = product(rows)
    return all(
        torch.equal(product(rows[start : start + count]), whole[start : start + count])
        for count in COUNTS
        for start in (0, 9)
    )


@pytest.mark.parametrize(("kind", "inputs"), SHAPES)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_is_the_product_and_rows_are_independent(kernels: Kernels, outputs: int, kind: WeightKind, inputs: int) -> None:
    weight, bias, rows = random(outputs, inputs), random(outputs, seed=1), random(300, inputs, seed=2)
    check_product(kernels, kind, weight, rows)
    packed = check_product(kernels, kind, weight, rows, bias)
    if outputs > 16:  # with more than one panel, of which the last has a tail
        assert rows_are_independent(lambda part: kernels.linear(packed, part), rows)


@pytest.mark.parametrize("inputs", INT8_INPUTS)
def test_scales_of_int8(kernels: Kernels, inputs: int) -> None:
    weight = random(17, inputs)
    expected = int8_oracle.quantise(weight, 127).scales
    np.testing.assert_array_equal(kernels.pack("int8", weight).scales.numpy(), expected)


@pytest.mark.parametrize(("kind", "inputs"), [("int8", 68), ("int8_rotated", 68), ("int4", 96)])
def test_many_panels_of_outputs(kernels: Kernels, kind: WeightKind, inputs: int) -> None:
    weight, rows = random(3000, inputs), random(130, inputs, seed=1)
    packed = check_product(kernels, kind, weight, rows)
    assert rows_are_independent(lambda part: kernels.linear(packed, part), rows)


def test_one_scale_for_all_rows_would_be_found_out() -> None:
    weight = random(17, 65)

    def product(rows: Tensor) -> Tensor:
        scale = rows.abs().max() / 127 if len(rows) else 1.0
        return (rows / scale).round() @ weight.T * scale

    assert not rows_are_independent(product, random(300, 65, seed=1))


@pytest.mark.parametrize(
    ("kind", "inputs"), [("int8", 5), ("int8", 576), ("int8_rotated", 576), ("int4", 32), ("int4", 576)]
)
def test_the_number_of_threads_does_not_matter(
    kernels: Kernels, kernels_library: Path, kind: WeightKind, inputs: int
) -> None:
    weight, rows = random(100, inputs), random(130, inputs, seed=1)
    results = []
    for threads in (1, 2, 3):
        team = Kernels(kernels_library, threads, kernels.isa)
        results.append(team.linear(team.pack(kind, weight), rows))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("inputs", INT8_INPUTS)
def test_sums_of_int8_are_exact_integers(kernels: Kernels, inputs: int) -> None:
    """Rows whose largest magnitude is the number of levels have the scale 1: what comes out are the sums themselves.

    So all instruction sets agree on them, bit for bit.
    """
    generator, levels = np.random.default_rng(inputs), int8_oracle.row_levels(inputs)
    x, weight = generator.integers(-levels, levels + 1, (50, inputs)), generator.integers(-127, 128, (40, inputs))
    x[:, inputs // 2] = generator.choice([-levels, levels], 50)
    weight[:, inputs // 3] = generator.choice([-127, 127], 40)
    result = kernels.linear(kernels.pack("int8", torch.from_numpy(weight).float()), torch.from_numpy(x).float())
    np.testing.assert_array_equal(result.numpy(), (x @ weight.T).astype(np.float32))


def extreme_signs(inputs: int) -> np.ndarray:
    """Rows of -1 and 1 [9, inputs], in all combinations of two adjacent pairs."""
    groups = [(1, 1, 1, 1), (1, -1, 1, -1), (1, 1, -1, -1), (1, -1, -1, 1), (-1, 1, 1, 1)]
    signs = np.array([*groups, *(tuple(-sign for sign in group) for group in groups[:4])])
    return np.tile(signs, -(-inputs // 4))[:, :inputs]


@pytest.mark.parametrize("inputs", [1536, 8259, 8260, 20_001])
def test_the_largest_sums_of_int8_do_not_overflow(kernels: Kernels, inputs: int) -> None:
    weight, rows = 127 * extreme_signs(inputs), int8_oracle.row_levels(inputs) * extreme_signs(inputs)
    result = kernels.linear(kernels.pack("int8", torch.from_numpy(weight).float()), torch.from_numpy(rows).float())
    np.testing.assert_array_equal(result.numpy(), (rows @ weight.T).astype(np.float32))


def test_sums_that_overflow_would_be_found_out() -> None:
    weight, rows = 127 * extreme_signs(20_001), 2047 * extreme_signs(20_001)
    assert ((rows @ weight.T).astype(np.int32) != rows @ weight.T).any()


ROTATED_SIZES = (64, 128, 1024, WIDEST_ROTATED)
"""Numbers of inputs that are rotated as one block, so that integers can be found that rotate to integers."""


def rotated_to(integers: np.ndarray) -> Tensor:
    """The rows [n, size] in float32 that become these integers [n, size] when they are rotated."""
    rows, size = integers.astype(np.float64), integers.shape[1]
    stride = 1
    while stride < size:  # Hadamard's matrix, which is symmetric and times itself is `size`
        pairs = rows.reshape(len(rows), -1, 2, stride)
        rows = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(rows.shape)
        stride *= 2
    return torch.from_numpy(rows).float()


@pytest.mark.parametrize("size", ROTATED_SIZES)
def test_sums_of_rotated_integers_are_exact(kernels: Kernels, size: int) -> None:
    generator = np.random.default_rng(size)
    random_x, random_weight = (generator.integers(-127, 128, (count, size)) for count in (30, 40))
    random_x[:, size // 2] = random_weight[:, size // 3] = 127
    extreme = 127 * extreme_signs(size)  # with the largest sums that there are
    x, weight = np.concatenate([random_x, extreme]), np.concatenate([random_weight, extreme])
    result = kernels.linear(kernels.pack("int8_rotated", rotated_to(weight)), rotated_to(x))
    np.testing.assert_array_equal(result.numpy(), (x @ weight.T).astype(np.float32) * size)


def test_inputs_that_cannot_be_rotated(kernels: Kernels) -> None:
    weight, rows = random(3, WIDEST_ROTATED + 1), random(2, WIDEST_ROTATED + 1, seed=1)
    with pytest.raises(ValueError, match="32,769 inputs cannot be rotated"):
        kernels.pack("int8_rotated", weight)
    product = NativePacker(kernels, "int8_rotated")(weight)
    assert torch.equal(product(rows, None), kernels.linear(kernels.pack("int8", weight), rows))


@pytest.mark.parametrize(
    ("kind", "inputs"), [("int8", 65), ("int8", 576), ("int8_rotated", 65), ("int8_rotated", 1600)]
)
def test_every_instruction_set_finds_the_same(
    kernels: Kernels, kernels_library: Path, kind: WeightKind, inputs: int
) -> None:
    weight, bias, rows = random(100, inputs), random(100, seed=1), random(50, inputs, seed=2)
    rows[:, 7] *= 30
    portable = Kernels(kernels_library, threads=1, isa="portable")
    expected = portable.linear(portable.pack(kind, weight, bias), rows)
    packed = kernels.pack(kind, weight, bias)
    assert torch.equal(kernels.linear(packed, rows), expected)
    assert torch.equal(packed.scales, portable.pack(kind, weight).scales)


def test_outliers_cost_less_when_they_are_rotated(kernels: Kernels) -> None:
    """With 8 bits: what the rotation is for."""
    weight, rows = random(64, 576), random(50, 576, seed=1)
    rows[:, 100] *= 100
    exact = rows.double() @ weight.double().T

    def error(product: Tensor) -> float:
        return float((product - exact).norm() / exact.norm())

    steps = rows.abs().amax(1, keepdim=True) / 127
    plain = (rows / steps).round() * steps @ weight.T
    assert error(kernels.linear(kernels.pack("int8_rotated", weight), rows)) < 0.5 * error(plain)


def test_halves_are_rounded_to_even(kernels: Kernels) -> None:
    numbers = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 125.5, -126.5]
    rounded = torch.tensor([0.0, 2, 2, 0, -2, -2, 126, 126, -126] * 3)
    weight = torch.tensor([[127.0, *numbers * 3]])  # 28: beyond a vector
    ones = torch.eye(28)
    assert torch.equal(kernels.linear(kernels.pack("int8", weight), 2047 * ones)[1:, 0], rounded * 2047)
    row = torch.tensor([[2047.0, *numbers * 3]])
    assert torch.equal(kernels.linear(kernels.pack("int8", 127 * ones), row)[0, 1:], rounded * 127)


@pytest.mark.parametrize(("kind", "inputs"), EACH)
def test_zeros(kernels: Kernels, kind: WeightKind, inputs: int) -> None:
    weight, bias, rows = random(17, inputs), random(17, seed=1), random(7, inputs, seed=2)
    packed = kernels.pack(kind, weight, bias)
    crowd = kernels.linear(packed, rows)
    rows[3] = 0
    result = kernels.linear(packed, rows)
    assert torch.equal(result[3], bias)
    assert torch.equal(result[[0, 1, 2, 4, 5, 6]], crowd[[0, 1, 2, 4, 5, 6]])
    assert torch.equal(kernels.linear(kernels.pack(kind, weight), rows)[3], torch.zeros(17))
    weight[5] = 0
    assert torch.equal(kernels.linear(kernels.pack(kind, weight, bias), rows)[:, 5], bias[5].expand(7))
    zero = kernels.pack(kind, torch.zeros(17, inputs))
    assert torch.equal(kernels.linear(zero, rows), torch.zeros(7, 17))


@pytest.mark.parametrize("magnitude", [1e30, 1e-20, 1.1e-30, 0.9e-30, 1e-38, 1e-44])
@pytest.mark.parametrize(("kind", "inputs"), EACH)
def test_extreme_magnitudes(kernels: Kernels, kind: WeightKind, inputs: int, magnitude: float) -> None:
    weight, rows = random(17, inputs).clamp(-1, 1), random(9, inputs, seed=1).clamp(-1, 1)
    weight[:, 7] = rows[:, 11] = 1
    rows[4] *= magnitude
    check_product(kernels, kind, weight, rows)
    weight[3] *= magnitude
    rows[4] /= rows[4].abs().max().clamp(min=1e-44)
    check_product(kernels, kind, weight, rows)


@pytest.mark.parametrize(("kind", "inputs"), EACH)
def test_the_largest_number(kernels: Kernels, kind: WeightKind, inputs: int) -> None:
    weight, rows = torch.eye(inputs)[:17] * 0.5, random(9, inputs, seed=1)
    rows[4, 3], rows[5, 40] = LARGEST, -LARGEST
    result = kernels.linear(check_product(kernels, kind, weight, rows), rows)
    assert result[4, 3] == pytest.approx(LARGEST / 2, rel=1e-3)
    assert (result[5] == 0).all()


@pytest.mark.parametrize("place", [0, 3, 33, 63, -1])
@pytest.mark.parametrize("broken", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("kind", "inputs"), EACH)
def test_what_is_not_finite_stays_in_its_row(
    kernels: Kernels, kind: WeightKind, inputs: int, broken: float, place: int
) -> None:
    packed, rows = kernels.pack(kind, random(17, inputs), random(17, seed=1)), random(8, inputs, seed=2)
    whole = kernels.linear(packed, rows)
    rows[4, place] = broken
    result = kernels.linear(packed, rows)
    assert result[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7]
    assert torch.equal(result[others], whole[others])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("kind", "inputs"), EACH)
def test_a_weight_that_is_not_finite_stays_in_its_output(
    kernels: Kernels, kind: WeightKind, inputs: int, broken: float
) -> None:
    weight, rows = random(17, inputs), random(8, inputs, seed=1)
    whole = kernels.linear(kernels.pack(kind, weight), rows)
    for output, place in ((4, 5), (16, -1)):
        weight[output, place] = broken
    result = kernels.linear(kernels.pack(kind, weight), rows)
    assert result[:, [4, 16]].isnan().all()
    others = [output for output in range(16) if output != 4]
    assert torch.equal(result[:, others], whole[:, others])


@pytest.mark.parametrize(("kind", "inputs"), EACH)
def test_as_the_weight_of_a_module(kernels: Kernels, kind: WeightKind, inputs: int) -> None:
    weight, bias, rows = random(17, inputs), random(17, seed=1), random(3, 4, inputs, seed=2)
    packed = PackedWeight(weight, NativePacker(kernels, kind))
    result = F.linear(rows, packed, bias)
    assert result.shape == (3, 4, 17)
    assert torch.equal(result.view(12, 17), kernels.linear(kernels.pack(kind, weight, bias), rows.view(12, inputs)))
    transposed = rows.transpose(0, 1)
    assert torch.equal(F.linear(transposed, packed), F.linear(transposed.contiguous(), packed))


@pytest.mark.parametrize("kind", ["int8", "int8_rotated", "int4"])
@pytest.mark.parametrize("count", [1, 7, 150])  # the last is more than one unit of work takes
def test_heads_with_a_weight_each_are_as_one_after_the_other(kind: WeightKind, count: int, kernels: Kernels) -> None:
    weights = [random(37, 64, seed=head) for head in range(5)]
    rows = random(count, 5, 64, seed=9)
    heads = NativeHeads(NativePacker(kernels, kind), torch.stack(weights))
    result = heads(rows)
    for head, weight in enumerate(weights):
        expected = kernels.linear(kernels.pack(kind, weight), rows[:, head].contiguous())
        assert torch.equal(result[:, head], expected)
    assert torch.equal(heads(rows[:1]), result[:1])
    assert heads(rows[:0]).shape == (0, 5, 37)


class WatchedMatrix(DenseMatrix):
    """Notes the rows that are read, and those that are given back."""

    def __init__(self, tensor: Tensor, log: list[tuple[str, int]]) -> None:
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "log", log)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        rows = super().read(start, stop)
        self.log.append(("read", len(rows)))
        return rows

    def drop(self, start: int, stop: int) -> None:
        self.log.append(("drop", stop - start))


@pytest.mark.parametrize("kind", ["int8", "int8_rotated", "int4"])
@pytest.mark.parametrize("outputs", [(100, 37, 64, 5), (1, 2, 3), (16, 32), (7, 200), (200, 7), (15, 1, 17)])
def test_matrices_that_end_within_a_panel_are_packed_slab_by_slab(
    kind: WeightKind, outputs: tuple[int, ...], kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed as if they were one matrix, while only a slab is in memory."""
    monkeypatch.setattr(native_packer, "_SLAB", 64 * 48)
    weights, log = [random(count, 64, seed=count) for count in outputs], []
    packed = NativePacker(kernels, kind).pack(Linear([WatchedMatrix(weight, log) for weight in weights]))
    whole = kernels.pack(kind, torch.cat(weights))
    assert torch.equal(packed.packed, whole.packed)
    assert torch.equal(packed.scales, whole.scales)
    held = 0
    for action, rows in log:
        held += rows if action == "read" else -rows
        assert held in range(49)
    assert held == 0
    assert sum(rows for action, rows in log if action == "read") == sum(outputs)
