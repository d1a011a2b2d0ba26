"""The int8 linear in numpy: quantised the same way, multiplied in integers, scaled in float64."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

_SMALLEST = np.float32(1e-30)  # numbers below it count as zero
_ROUNDINGS = 4  # of the sum to float32, two factors, the bias

Floats = npt.NDArray[np.float64]


WEIGHT_LEVELS = 127


@dataclass(frozen=True, slots=True)
class Quantised:
    """Integers, and for each row what one of them stands for."""

    integers: npt.NDArray[np.int64]  # [n, width]
    scales: npt.NDArray[np.float32]  # [n]


def row_levels(inputs: int) -> int:
    """The largest integer in a row: 12 bits, or what keeps the largest sum of products below 2^31."""
    return min(2047, (2**31 - 1) // (WEIGHT_LEVELS * inputs))


def quantise(rows: Tensor, levels: int) -> Quantised:
    """Each row's largest magnitude becomes `levels`; to nearest, halves to even."""
    x = rows.numpy()
    highest = np.abs(x).max(axis=1)
    highest = np.where(highest < _SMALLEST, np.float32(0), highest)
    factor = np.divide(np.float32(levels), highest, out=np.zeros_like(highest), where=highest > 0)
    return Quantised(np.rint(x * factor[:, None]).astype(np.int64), highest / np.float32(levels))


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Floats, Floats]:
    """The product [n, outputs] of quantised rows [n, inputs] and weight [outputs, inputs], and how far off float32 is.

    A result in float32 is rounded four times, each time by half a unit in the last place at most.
    """
    x, w = quantise(rows, row_levels(rows.shape[1])), quantise(weight, WEIGHT_LEVELS)
    scales = x.scales[:, None].astype(np.float64) * w.scales
    product = x.integers @ w.integers.T * scales
    added = np.zeros(1) if bias is None else bias.double().numpy()
    error = _ROUNDINGS * 2.0**-24 * (np.abs(product) + np.abs(added))
    return product + added, error + np.finfo(np.float32).smallest_subnormal
