"""Weights in int4: what packing keeps of them, and sums at their limits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model_runner.kernels.library import Kernels
from model_runner.native.packer import NativePacker
from tests.model_runner.kernels import int4_oracle
from tests.model_runner.kernels.int4_oracle import GROUP, ROW_LEVELS


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def from_groups(outputs: int, groups: int, magnitude: float = 1.0) -> Tensor:
    """A weight as a file in Q4_1 has it: scales and minimums in half precision, both 0 and 15 in every group."""
    generator = np.random.default_rng(0)
    integers = generator.integers(0, 16, (outputs, groups, GROUP))
    integers[..., 5], integers[..., 20] = 15, 0
    scales = generator.uniform(0.001, 0.1, (outputs, groups, 1)).astype(np.float16).astype(np.float32)
    minimums = generator.uniform(-1, 0.2, (outputs, groups, 1)).astype(np.float16).astype(np.float32)
    weight = (scales * integers.astype(np.float32) + minimums) * np.float32(magnitude)
    return torch.from_numpy(weight.reshape(outputs, groups * GROUP))


@pytest.mark.parametrize("magnitude", [1.0, 2.0**-60, 2.0**60])
@pytest.mark.parametrize("outputs", [1, 16, 37])
def test_weights_that_came_from_int4_stay_as_they_are(kernels: Kernels, outputs: int, magnitude: float) -> None:
    weight = from_groups(outputs, 5, magnitude)
    packed = int4_oracle.dense(kernels.pack("int4", weight))
    np.testing.assert_array_equal(packed.astype(np.float32), weight.numpy())


@pytest.mark.parametrize("inputs", [32, 576])
def test_other_weights_are_closer_than_between_the_extremes(kernels: Kernels, inputs: int) -> None:
    weight = random(100, inputs)
    groups = (100, inputs // GROUP, GROUP)

    def error(values: int4_oracle.Floats) -> int4_oracle.Floats:
        squares: int4_oracle.Floats = ((values - weight.double().numpy()) ** 2).reshape(groups).sum(2)
        return squares

    packed, simple = error(int4_oracle.dense(kernels.pack("int4", weight))), error(int4_oracle.between_extremes(weight))
    assert (packed <= simple * (1 + 1e-5)).all()
    assert packed.sum() < 0.9 * simple.sum()


def test_each_group_has_a_line_of_its_own(kernels: Kernels) -> None:
    """Groups that differ by orders of magnitude within an output lose nothing to each other."""
    weight = random(17, 96)
    small, large = weight.clone(), weight.clone()
    small[:, 32:64] *= 2.0**-9
    large[:, 32:64] *= 2.0**9
    reference = int4_oracle.dense(kernels.pack("int4", weight))
    for changed, factor in ((small, 2.0**-9), (large, 2.0**9)):
        values = int4_oracle.dense(kernels.pack("int4", changed))
        values[:, 32:64] /= factor
        np.testing.assert_array_equal(values, reference)


def test_groups_of_equal_weights(kernels: Kernels) -> None:
    weight = torch.full((17, 64), 0.375)
    weight[:, 32:] = -1.5
    np.testing.assert_array_equal(int4_oracle.dense(kernels.pack("int4", weight)), weight.numpy())


def test_all_instruction_sets_pack_the_same_bits(kernels: Kernels, kernels_library: Path) -> None:
    weight = torch.cat([random(40, 576), 1e-5 * random(40, 576), 1e20 * random(1, 576)])
    packed = kernels.pack("int4", weight)
    portable = Kernels(kernels_library, threads=1, isa="portable").pack("int4", weight)
    assert torch.equal(packed.packed, portable.packed)
    assert torch.equal(packed.scales, portable.scales)


def test_the_largest_sums(kernels: Kernels) -> None:
    """Rows keep 12 bits at any width, for a group's sum has room for them."""
    signs = np.tile([1, -1, 1, 1], 5008)
    ones = np.ones_like(signs)
    fine = np.where(np.arange(len(signs)) == 0, ROW_LEVELS, 1)
    rows = np.stack([ROW_LEVELS * ones, -ROW_LEVELS * ones, ROW_LEVELS * signs, fine])
    weight = np.stack([np.tile([15, 0] + [15] * 30, 626), np.tile([0] + [15] * 31, 626), np.where(signs > 0, 15, 0)])
    packed = kernels.pack("int4", torch.from_numpy(weight).float())
    np.testing.assert_array_equal(int4_oracle.dense(packed), weight)
    result = kernels.linear(packed, torch.from_numpy(rows).float())
    np.testing.assert_allclose(result.numpy(), rows @ weight.T, rtol=1e-5)


def test_inputs_that_make_no_whole_groups(kernels: Kernels) -> None:
    weight, rows = random(17, 48), random(3, 48, seed=1)
    with pytest.raises(ValueError, match="48 inputs cannot be packed in int4"):
        kernels.pack("int4", weight)
    product = NativePacker(kernels, "int4")(weight)
    assert torch.equal(product(rows, None), kernels.linear(kernels.pack("int8", weight), rows))
