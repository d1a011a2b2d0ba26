"""Products in fp8: rows and weights rounded with exact scales, and the sum of what they were rounded to."""

import pytest
import torch

from model_runner.cuda.linear import Fp8Product, quantize_weight
from model_runner.kernels.triton.linear import FP8, quantize_rows
from tests.model_runner.triton.linear_oracle import check_product, random

_SUM_ERROR = 5e-4
"""Hopper's fp8 products keep about 14 bits of a sum of 128 products."""


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.empty(rows.shape, dtype=FP8, device=rows.device)
    scales = torch.empty(len(rows), device=rows.device)
    quantize_rows(rows, numbers, scales)
    return numbers, scales


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rows_are_rounded_as_torch_rounds(dtype: torch.dtype, device: torch.device) -> None:
    rows = random(9, 5000, seed=0, device=device, dtype=dtype)[:, :4500]
    rows[3] *= 1000
    rows[4] = 0
    numbers, scales = quantized(rows)
    largest = rows.float().abs().amax(1)
    # CUDA multiplies by the reciprocal of a plain number, so 448 is a tensor.
    assert torch.equal(scales, torch.where(largest > 0, largest / torch.full_like(largest, 448), 1))
    expected = (rows.float() / scales[:, None]).clamp(-448, 448).to(FP8)
    assert torch.equal(numbers.float(), expected.float())
    assert (numbers.float().abs().amax(1) == torch.where(largest > 0, 448.0, 0.0)).all()


def test_what_is_no_number_stays_so(device: torch.device) -> None:
    rows = random(3, 128, seed=0, device=device, dtype=torch.bfloat16)
    rows[1, 5] = torch.nan
    numbers, scales = quantized(rows)
    assert numbers.float().isnan().nonzero().tolist() == [[1, 5]]
    assert scales.isfinite().all()
    out = Fp8Product(random(64, 128, seed=1, device=device, dtype=torch.bfloat16))(rows)
    assert out.isnan().all(1).tolist() == [False, True, False]


def test_weight_is_rounded_with_a_scale_for_each_output(device: torch.device) -> None:
    weight = random(3, 40, 64, seed=0, device=device, dtype=torch.bfloat16)
    weight[1, 7] = 0
    numbers, scales = quantize_weight(weight)
    assert numbers.dtype == FP8
    error = (numbers.float() * scales[..., None] - weight.float()).abs()
    step = weight.float().abs().clamp(min=2**-6 * scales[..., None]) / 16  # 3 bits after the leading one
    assert (error <= step * (1 + 1e-6)).all()
    assert torch.equal(scales[1, 7], torch.ones((), device=device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("count", "out", "width"), [(1, 64, 128), (3, 100, 72), (70, 33, 272)])
def test_product(count: int, out: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    rows, weight = (random(n, width, seed=n, device=device, dtype=dtype) for n in (count, out))
    bias, residual = (random(*size, seed=2, device=device, dtype=dtype) for size in ((out,), (count, out)))
    product = Fp8Product(weight)
    (row_numbers, row_scales), (numbers, scales) = quantized(rows), quantize_weight(weight)
    stored = row_numbers.double() * row_scales.double()[:, None], numbers.double() * scales.double()[:, None]
    check_product(product(rows), *stored, sum_error=_SUM_ERROR)
    check_product(product(rows, bias, residual), *stored, (bias, residual), sum_error=_SUM_ERROR)
    assert product(rows).dtype == dtype
    # It also equals the product of the rounded numbers, except for the error of 3 bits in each factor.
    error = product(rows).double() - rows.double() @ weight.double().T
    assert error.std() < 0.08 * (rows.double() @ weight.double().T).std()
