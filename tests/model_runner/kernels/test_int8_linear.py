"""The int8 linear against its definition, and its independence from the other rows, the threads and the machine."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_runner.kernels.library import Kernels
from model_runner.models.int8 import Int8Product
from model_runner.models.packed import PackedWeight
from tests.model_runner.kernels import int8_oracle

OUTPUTS = (1, 15, 16, 17, 100)
INPUTS = (1, 3, 4, 5, 63, 64, 65, 576, 1536)
COUNTS = (0, 1, 2, 5, 6, 7, 13, 119, 120, 121)
LARGEST = torch.finfo(torch.float32).max


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_is_the_product(result: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    expected, error = int8_oracle.linear(rows, weight, bias)
    assert (np.abs(result.double().numpy() - expected) <= error).all()


def rows_are_independent(product: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    """Do rows come out the same whichever others are beside them, before them and after?"""
    whole = product(rows)
    return all(
        torch.equal(product(rows[start : start + count]), whole[start : start + count])
        for count in COUNTS
        for start in (0, 9)
    )


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_is_the_product_and_rows_are_independent(kernels: Kernels, outputs: int, inputs: int) -> None:
    weight, bias, rows = random(outputs, inputs), random(outputs, seed=1), random(300, inputs, seed=2)
    packed = kernels.pack_int8(weight, bias)
    assert_is_the_product(kernels.linear(packed, rows), rows, weight, bias)
    assert_is_the_product(kernels.linear(kernels.pack_int8(weight), rows), rows, weight)
    np.testing.assert_array_equal(packed.scales.numpy(), int8_oracle.quantise(weight, 127).scales)
    assert rows_are_independent(lambda part: kernels.linear(packed, part), rows)


def test_many_panels_of_outputs(kernels: Kernels) -> None:
    weight, rows = random(3000, 68), random(130, 68, seed=1)
    packed = kernels.pack_int8(weight)
    assert_is_the_product(kernels.linear(packed, rows), rows, weight)
    assert rows_are_independent(lambda part: kernels.linear(packed, part), rows)


def test_one_scale_for_all_rows_would_be_found_out() -> None:
    weight = random(17, 65)

    def product(rows: Tensor) -> Tensor:
        scale = rows.abs().max() / 127 if len(rows) else 1.0
        return (rows / scale).round() @ weight.T * scale

    assert not rows_are_independent(product, random(300, 65, seed=1))


@pytest.mark.parametrize("inputs", [5, 576])
def test_the_number_of_threads_does_not_matter(kernels: Kernels, kernels_library: Path, inputs: int) -> None:
    weight, rows = random(100, inputs), random(130, inputs, seed=1)
    results = []
    for threads in (1, 2, 3):
        team = Kernels(kernels_library, threads, kernels.isa)
        results.append(team.linear(team.pack_int8(weight), rows))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("inputs", INPUTS)
def test_sums_are_exact_integers(kernels: Kernels, inputs: int) -> None:
    """Rows whose largest magnitude is the number of levels have the scale 1: what comes out are the sums themselves.

    So all instruction sets agree on them, bit for bit.
    """
    generator, levels = np.random.default_rng(inputs), int8_oracle.row_levels(inputs)
    x, weight = generator.integers(-levels, levels + 1, (50, inputs)), generator.integers(-127, 128, (40, inputs))
    x[:, inputs // 2] = generator.choice([-levels, levels], 50)
    weight[:, inputs // 3] = generator.choice([-127, 127], 40)
    result = kernels.linear(kernels.pack_int8(torch.from_numpy(weight).float()), torch.from_numpy(x).float())
    np.testing.assert_array_equal(result.numpy(), (x @ weight.T).astype(np.float32))


def extreme_signs(inputs: int) -> np.ndarray:
    """Rows of -1 and 1 [9, inputs], in all ways that the numbers of two pairs can stand beside each other."""
    groups = [(1, 1, 1, 1), (1, -1, 1, -1), (1, 1, -1, -1), (1, -1, -1, 1), (-1, 1, 1, 1)]
    signs = np.array([*groups, *(tuple(-sign for sign in group) for group in groups[:4])])
    return np.tile(signs, -(-inputs // 4))[:, :inputs]


@pytest.mark.parametrize("inputs", [1536, 8259, 8260, 20_001])
def test_the_largest_sums_do_not_overflow(kernels: Kernels, inputs: int) -> None:
    weight, rows = 127 * extreme_signs(inputs), int8_oracle.row_levels(inputs) * extreme_signs(inputs)
    result = kernels.linear(kernels.pack_int8(torch.from_numpy(weight).float()), torch.from_numpy(rows).float())
    np.testing.assert_array_equal(result.numpy(), (rows @ weight.T).astype(np.float32))


def test_sums_that_overflow_would_be_found_out() -> None:
    weight, rows = 127 * extreme_signs(20_001), 2047 * extreme_signs(20_001)
    assert ((rows @ weight.T).astype(np.int32) != rows @ weight.T).any()


def test_halves_are_rounded_to_even(kernels: Kernels) -> None:
    numbers = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 125.5, -126.5]
    rounded = torch.tensor([0.0, 2, 2, 0, -2, -2, 126, 126, -126] * 3)
    weight = torch.tensor([[127.0, *numbers * 3]])  # 28: beyond a vector
    ones = torch.eye(28)
    assert torch.equal(kernels.linear(kernels.pack_int8(weight), 2047 * ones)[1:, 0], rounded * 2047)
    row = torch.tensor([[2047.0, *numbers * 3]])
    assert torch.equal(kernels.linear(kernels.pack_int8(127 * ones), row)[0, 1:], rounded * 127)


def test_zeros(kernels: Kernels) -> None:
    weight, bias, rows = random(17, 65), random(17, seed=1), random(7, 65, seed=2)
    packed = kernels.pack_int8(weight, bias)
    crowd = kernels.linear(packed, rows)
    rows[3] = 0
    result = kernels.linear(packed, rows)
    assert torch.equal(result[3], bias)
    assert torch.equal(result[[0, 1, 2, 4, 5, 6]], crowd[[0, 1, 2, 4, 5, 6]])
    assert torch.equal(kernels.linear(kernels.pack_int8(weight), rows)[3], torch.zeros(17))
    weight[5] = 0
    assert torch.equal(kernels.linear(kernels.pack_int8(weight, bias), rows)[:, 5], bias[5].expand(7))
    zero = kernels.pack_int8(torch.zeros(17, 65))
    assert torch.equal(kernels.linear(zero, rows), torch.zeros(7, 17))


@pytest.mark.parametrize("magnitude", [1e30, 1e-20, 1.1e-30, 0.9e-30, 1e-38, 1e-44])
def test_extreme_magnitudes(kernels: Kernels, magnitude: float) -> None:
    weight, rows = random(17, 65).clamp(-1, 1), random(9, 65, seed=1).clamp(-1, 1)
    weight[:, 7] = rows[:, 11] = 1
    rows[4] *= magnitude
    assert_is_the_product(kernels.linear(kernels.pack_int8(weight), rows), rows, weight)
    weight[3] *= magnitude
    rows[4] /= rows[4].abs().max().clamp(min=1e-44)
    assert_is_the_product(kernels.linear(kernels.pack_int8(weight), rows), rows, weight)


def test_the_largest_number(kernels: Kernels) -> None:
    weight, rows = torch.eye(65)[:17] * 0.5, random(9, 65, seed=1)
    rows[4, 3], rows[5, 40] = LARGEST, -LARGEST
    result = kernels.linear(kernels.pack_int8(weight), rows)
    assert_is_the_product(result, rows, weight)
    assert result[4, 3] == pytest.approx(LARGEST / 2)
    assert (result[5] == 0).all()


@pytest.mark.parametrize("place", [0, 3, 33, 63, 64])
@pytest.mark.parametrize("broken", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(kernels: Kernels, broken: float, place: int) -> None:
    weight, bias, rows = random(17, 65), random(17, seed=1), random(8, 65, seed=2)
    whole = kernels.linear(kernels.pack_int8(weight, bias), rows)
    rows[4, place] = broken
    result = kernels.linear(kernels.pack_int8(weight, bias), rows)
    assert result[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7]
    assert torch.equal(result[others], whole[others])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_stays_in_its_output(kernels: Kernels, broken: float) -> None:
    weight, rows = random(17, 65), random(8, 65, seed=1)
    whole = kernels.linear(kernels.pack_int8(weight), rows)
    weight[16, 64] = broken
    result = kernels.linear(kernels.pack_int8(weight), rows)
    assert result[:, 16].isnan().all()
    assert torch.equal(result[:, :16], whole[:, :16])


def test_as_the_weight_of_a_module(kernels: Kernels) -> None:
    weight, bias, rows = random(17, 65), random(17, seed=1), random(3, 4, 65, seed=2)
    packed = PackedWeight(weight, lambda plain: Int8Product(plain, kernels))
    result = F.linear(rows, packed, bias)
    assert result.shape == (3, 4, 17)
    assert torch.equal(result.view(12, 17), kernels.linear(kernels.pack_int8(weight, bias), rows.view(12, 65)))
    transposed = rows.transpose(0, 1)
    assert torch.equal(F.linear(transposed, packed), F.linear(transposed.contiguous(), packed))
