"""Sums of rows: right, and the same bits for a row alone, among others, and before numbers that are not its own."""

import pytest
import torch

from model_runner.row_sums import _double, _halve, cumulative_sums, row_sums

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def values(num_rows: int, width: int) -> torch.Tensor:
    return torch.rand(num_rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width)) - 0.4


@pytest.mark.parametrize("width", [0, 1, 2, 3, 8, 1000, 4097])
def test_sums_on_cuda_are_right(width: int) -> None:
    rows = values(3, width)
    torch.testing.assert_close(_halve(rows), rows.cumsum(-1)[:, -1:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(_double(rows), rows.cumsum(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [3, 1000, 50001])
def test_a_row_alone_and_among_others(device: str, width: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    rows = values(33, width).to(device)
    for sums in (row_sums, cumulative_sums):
        together = sums(rows)
        assert all(torch.equal(sums(rows[row : row + 1])[0], together[row]) for row in (0, 7, 32))
        assert torch.equal(sums(rows[:5]), together[:5])


def test_what_comes_after_does_not_matter() -> None:
    rows = values(3, 100)
    assert torch.equal(_double(rows)[:, :37], _double(rows[:, :37]))
