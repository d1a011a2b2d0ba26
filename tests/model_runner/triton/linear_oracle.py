"""Products in float64, and how far from them float32 sums of rounded numbers may be."""

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


def random(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def check_product(result: Tensor, rows: Tensor, weight: Tensor, addends: Tensors = (), sum_error: float = 3e-5) -> None:
    """Result [n, out] is rows @ weight^T plus what is added, rounded once to its type.

    The numbers of rows and weight are those that are multiplied; `sum_error` is of a sum, as a share of its terms'
    magnitudes: tensor cores cut off the ends of what they add.
    """
    rows, weight = rows.double(), weight.double()
    expected = rows @ weight.T
    magnitude = rows.abs() @ weight.abs().T
    for addend in addends:
        expected = expected + addend.double()
        magnitude = magnitude + addend.double().abs()
    rounding = torch.finfo(result.dtype).eps / 2
    assert torch.isfinite(result).all()
    error = (result.double() - expected).abs()
    assert (error <= rounding * expected.abs() + sum_error * magnitude).all(), error.max()
