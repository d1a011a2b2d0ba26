"""Norms and the residual addition before them against float64, and independent rows."""

import numpy as np
import pytest
import torch
from torch import Tensor

from model_runner.kernels.triton.norm import add_and_norm, rms_norm

EPS = 0.01
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Half a unit in the last place, of a number just above a power of two, and more than float32's own errors."""
DTYPES = list(TOLERANCE)


def truth(rows: Tensor, factor: Tensor, *, is_centred: bool = False) -> np.ndarray:
    x = rows.double().cpu().numpy()
    if is_centred:
        x = x - x.mean(axis=1, keepdims=True)
    result: np.ndarray = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * factor.double().cpu().numpy()
    return result


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_near(result: Tensor, expected: np.ndarray) -> None:
    bound = TOLERANCE[result.dtype] * np.abs(expected) + 1e-6
    assert (np.abs(result.double().cpu().numpy() - expected) <= bound * 1.01).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "hidden"), [(3, 16), (40, 20), (2, 576), (2, 4096), (1, 16384), (5, 1000)])
@pytest.mark.parametrize("is_centred", [False, True])
def test_norm(num_rows: int, hidden: int, dtype: torch.dtype, is_centred: bool, device: torch.device) -> None:
    rows, factor = random((num_rows, hidden), dtype, device), random((hidden,), torch.float32, device, 1)
    result = rms_norm(rows + 1, factor, EPS, is_centred=is_centred)
    assert result.dtype == dtype
    assert_near(result, truth(rows + 1, factor, is_centred=is_centred))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_post_norm", [False, True])
def test_addition_and_norm(dtype: torch.dtype, has_post_norm: bool, device: torch.device) -> None:
    rows, added = random((5, 100), dtype, device), random((5, 100), dtype, device, 1)
    post_factor, factor = random((100,), torch.float32, device, 2), random((100,), dtype, device, 3)
    total, norm = add_and_norm(rows, added, 0.3, post_factor if has_post_norm else None, factor, EPS)
    branch = truth(added, post_factor) if has_post_norm else added.double().cpu().numpy()
    assert_near(total, rows.double().cpu().numpy() + 0.3 * branch)
    assert norm is not None
    assert torch.equal(norm, rms_norm(total, factor, EPS))
    alone, none = add_and_norm(rows, added, 0.3, post_factor if has_post_norm else None, None, EPS)
    assert none is None
    assert torch.equal(alone, total)


@pytest.mark.parametrize("hidden", [20, 64, 1040])
def test_rows_alone_and_in_a_crowd(hidden: int, device: torch.device) -> None:
    rows, factor = random((23, hidden), torch.float32, device), random((hidden,), torch.float32, device, 1)
    crowd = rms_norm(rows, factor, EPS)
    for row in (0, 1, 22):
        assert torch.equal(rms_norm(rows[row : row + 1], factor, EPS)[0], crowd[row])
        assert torch.equal(rms_norm(rows[row : row + 1].clone(), factor, EPS)[0], crowd[row])
    columns = torch.empty(hidden, 23, device=device).copy_(rows.T).T
    wide = torch.cat([rows, rows], dim=1)
    for strided in (columns, wide[:, :hidden], wide[:, hidden:], rows.repeat_interleave(2, 0)[::2]):
        assert torch.equal(rms_norm(strided, factor, EPS), crowd)
        total, _ = add_and_norm(rows, strided, 1.0, None, None, EPS)
        assert torch.equal(total, 2 * rows)


def test_where_the_result_goes(device: torch.device) -> None:
    rows, factor = random((3, 20), torch.float32, device), torch.ones(20, device=device)
    out = torch.empty_like(rows)
    assert rms_norm(rows, factor, EPS, out=out) is out
    assert torch.equal(out, rms_norm(rows, factor, EPS))


def test_no_rows(device: torch.device) -> None:
    rows, factor = torch.empty(0, 20, device=device), torch.ones(20, device=device)
    assert rms_norm(rows, factor, EPS).shape == (0, 20)


def test_too_wide(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"16,385"):
        rms_norm(torch.empty(1, 16385, device=device), torch.ones(16385, device=device), EPS)
