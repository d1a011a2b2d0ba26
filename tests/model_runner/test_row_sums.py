"""Sums and softmaxes of rows: right, and the same bits for a row alone, among others, before what is not its own."""

import pytest
import torch

from model_runner.kernels.row_sums import (
    _double,
    _filled_up,
    _halve,
    cumulative_sums,
    entropies,
    row_log_softmax,
    row_softmax,
    row_sums,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def values(num_rows: int, width: int) -> torch.Tensor:
    return torch.rand(num_rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width)) - 0.4


@pytest.mark.parametrize("width", [0, 1, 2, 3, 8, 1000, 4097])
def test_sums_on_cuda_are_right(width: int) -> None:
    rows = values(3, width)
    torch.testing.assert_close(_halve(rows), rows.cumsum(-1)[:, -1:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(_double(rows), rows.cumsum(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("softmax", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("width", [1, 2, 3, 1000, 4097])
def test_softmaxes_on_cuda_are_right(width: int, softmax, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    rows = values(3, width).to(dtype)
    rows[1, 0] = -torch.inf
    for given in (rows, rows[2]):
        torch.testing.assert_close(_filled_up(softmax, given), softmax(given, -1), equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [3, 1000, 50001])
def test_a_row_alone_and_among_others(device: str, width: int, dtype: torch.dtype) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    rows = values(33, width).to(device, dtype)
    for of_rows in (row_sums, cumulative_sums, row_softmax, row_log_softmax):
        together = of_rows(rows)
        assert all(torch.equal(of_rows(rows[row : row + 1])[0], together[row]) for row in (0, 7, 32))
        assert torch.equal(of_rows(rows[:5]), together[:5])


def test_entropies() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    expected = [[0.6931471805599453], [0.0], [1.0296530140645737]]
    torch.testing.assert_close(entropies(probs), torch.tensor(expected, dtype=torch.float64))


def test_what_comes_after_does_not_matter() -> None:
    rows = values(3, 100)
    assert torch.equal(_double(rows)[:, :37], _double(rows[:, :37]))
