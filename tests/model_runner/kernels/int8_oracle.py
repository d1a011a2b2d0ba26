"""What the int8 linear computes, in numpy: quantised the same way, multiplied in integers, scaled in float64."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

_SMALLEST = np.float32(1e-30)  # numbers below it count as zero
_ROUNDINGS = 4  # of the sum to float32, two factors, the bias

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Quantised:
    """Integers of at most 127, and for each row what one of them stands for."""

    integers: npt.NDArray[np.int64]  # [n, width]
    scales: npt.NDArray[np.float32]  # [n]


def quantise(rows: Tensor) -> Quantised:
    """Each row's largest magnitude becomes 127; to nearest, halves to even."""
    x = rows.numpy()
    highest = np.abs(x).max(axis=1)
    highest = np.where(highest < _SMALLEST, np.float32(0), highest)
    factor = np.divide(np.float32(127), highest, out=np.zeros_like(highest), where=highest > 0)
    return Quantised(np.rint(x * factor[:, None]).astype(np.int64), highest / np.float32(127))


def saturating_sums(x: npt.NDArray[np.int64], weight: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What instructions give that multiply unsigned with signed bytes and add two products in 16 bits: too little.

    Args:
        x: [n, inputs] of at most 127.
        weight: [outputs, inputs] likewise; made unsigned by adding 128.
    """
    products = (weight + 128)[None] * x[:, None]  # [n, outputs, inputs]
    pairs = products.reshape(*products.shape[:2], -1, 2).sum(-1).clip(-32768, 32767)
    return pairs.sum(-1) - 128 * x.sum(-1, keepdims=True)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Floats, Floats]:
    """The product [n, outputs] of quantised rows [n, inputs] and weight [outputs, inputs], and how far off float32 is.

    A result in float32 is rounded four times, each time by half a unit in the last place at most.
    """
    x, w = quantise(rows), quantise(weight)
    scales = x.scales[:, None].astype(np.float64) * w.scales
    product = x.integers @ w.integers.T * scales
    added = np.zeros(1) if bias is None else bias.double().numpy()
    error = _ROUNDINGS * 2.0**-24 * (np.abs(product) + np.abs(added))
    return product + added, error + np.finfo(np.float32).smallest_subnormal
