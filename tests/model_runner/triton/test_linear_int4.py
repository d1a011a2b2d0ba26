"""Products with weights in int4: how weights are packed, and the sum of what they were rounded to."""

import numpy as np
import pytest
import torch

from model_runner.cuda.linear import Int4Product, TritonProduct, make_product, pack_int4
from model_runner.kernels.triton.linear_int4 import dequantize, int4_operands, linear_int4
from model_runner.kernels.triton.tiles import all_shapes
from tests.model_runner.kernels import int4_oracle
from tests.model_runner.triton.linear_oracle import check_product, random

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("count", "out", "width"), [(1, 64, 128), (3, 100, 96), (17, 33, 256), (70, 40, 32)])
def test_product(count: int, out: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    rows, weight = (random(n, width, seed=n, device=device, dtype=dtype) for n in (count, out))
    bias, residual = (random(*size, seed=2, device=device, dtype=dtype) for size in ((out,), (count, out)))
    product = Int4Product(weight)
    stored = dequantize(product.weight, dtype)
    assert stored.shape == weight.shape
    check_product(product(rows), rows, stored)
    check_product(product(rows, bias, residual), rows, stored, (bias, residual))


def test_every_shape_of_tiles(device: torch.device) -> None:
    rows, weight = (random(n, 128, seed=n, device=device, dtype=torch.bfloat16) for n in (150, 200))
    packed = pack_int4(weight)
    tried = all_shapes(int4_operands(packed.group), packed.inputs)
    assert len(tried) == 5
    for shape in tried:
        result = linear_int4(rows, packed, rows.new_empty(150, 200), shape=shape)
        check_product(result, rows, dequantize(packed, torch.bfloat16))


def test_weights_that_came_from_groups_stay_as_they_are(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(0, 16, (24, 2, 128), generator=generator)
    integers[..., :2] = torch.tensor([0, 15])
    scale = torch.rand(24, 2, 1, generator=generator).mul(8).round().add(1) / 64
    minimum = torch.rand(24, 2, 1, generator=generator).mul(-64).round() / 64
    weight = (integers * scale + minimum).view(24, 256).to(device)
    assert torch.equal(dequantize(pack_int4(weight), torch.float32), weight)


def test_error_is_smaller_than_between_extremes(device: torch.device) -> None:
    weight = random(64, 160, seed=0, device=device)  # groups of 32, as the oracle's
    packed = dequantize(pack_int4(weight), torch.float32)
    simple = torch.from_numpy(int4_oracle.between_extremes(weight.cpu())).to(device)
    assert np.prod(pack_int4(weight).lines.shape) == 5 * 64
    assert (packed - weight).square().sum() < 0.9 * (simple - weight).square().sum()


def test_groups_of_one_number(device: torch.device) -> None:
    weight = torch.full((8, 128), 0.375, device=device)
    weight[3] = 0
    assert torch.equal(dequantize(pack_int4(weight), torch.float32), weight)


def test_experts_are_packed_one_by_one(device: torch.device) -> None:
    weight = random(3, 16, 256, seed=0, device=device)
    packed = pack_int4(weight)
    for expert, its_weight in enumerate(weight):
        alone = pack_int4(its_weight)
        assert torch.equal(packed.nibbles[expert], alone.nibbles)
        assert torch.equal(packed.lines[expert], alone.lines)


def test_what_int4_cannot_hold(device: torch.device) -> None:
    weight = random(8, 40, seed=0, device=device, dtype=torch.bfloat16)
    assert isinstance(make_product(weight, "int4", exact=True), TritonProduct)
    with pytest.raises(ValueError, match="40 inputs cannot be packed in int4"):
        pack_int4(weight)
    with pytest.raises(ValueError, match="beyond the range of float16"):
        pack_int4(random(8, 128, seed=0, device=device) * 1e6)
    with pytest.raises(TypeError, match="float32"):
        Int4Product(random(8, 128, seed=0, device=device))(random(1, 128, seed=1, device=device))
